"""The laboratory: training, comparison and measurement of optimizers."""
