"""The optimizers, one class a file: hyper-parameters, docstring with the equations, rules."""
