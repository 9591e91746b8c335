"""The first try: every optimizer with its defaults, on a dozen small real tasks.

tasks/         the tasks: configs of the laboratory, with an entry for each scale
data, lora     their data, and a model and data of their own
suite          the tasks by name, and the config of a run
entrants       the optimizers, by name and options
runs           runs on the laboratory's engine, side by side, resumable
records        the file of records
table          records as a table
verdict        records against the bars
tuned          the best setting of each optimizer
command        what `rootfree bench --first-try` does
"""
