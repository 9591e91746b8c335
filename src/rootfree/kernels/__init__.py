"""Rules in fewer passes over memory, for devices that have them; plan.py says where they run.

A kernel does what a rule does and is tested against it; where there is none the rule runs.
"""
