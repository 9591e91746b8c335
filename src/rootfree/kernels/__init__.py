"""Kernels that do the work of the rules in fewer passes over memory; plan.py says where they run.

Each kernel computes what a rule computes, and is tested against it. Where there is no kernel, the
rule runs.
"""
