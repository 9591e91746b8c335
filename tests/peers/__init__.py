"""Agreement with the published packages: they are oracles here, never sources of code.

The modules import the packages inside functions, so that collecting them needs neither package.
"""
