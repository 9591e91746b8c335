"""`python -m rootfree_lab`: the command, where its script is not on the path."""

from rootfree_lab.cli import main

main()
