"""The claims of the paper, checked numerically on the library: `rootfree verify`.

A claim is a small function that measures one figure (a difference, a slope, an estimate) and says
whether it clears the bar; table.py lists them, one file a family holds them.
"""
