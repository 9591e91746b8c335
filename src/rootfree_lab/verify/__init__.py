"""The claims of the paper, checked numerically on the library: `rootfree verify`.

A claim is a small function that measures one figure (a difference, a slope, an estimate) and says
whether it clears the bar; one file a family holds them, report.py lists and measures them.
"""
