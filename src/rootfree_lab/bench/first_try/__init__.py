"""The first try: every optimizer with its defaults, on a dozen small real tasks.

data           the data of the tasks, from the cache or from a compact folder
task           what a task is: a model, its loss at a step, B, what is measured at the end
*_tasks, lora  the tasks themselves, by kind
suite          all tasks by name, with their steps and schedules
entrants       the optimizers, by name and options
training       one run: a task, an optimizer, a seed; its record
runs           many runs, side by side, resumable; the file of records
table          records as a table
verdict        records against the bars
command        what `rootfree bench --first-try` does
"""
