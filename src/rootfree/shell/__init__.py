"""What all optimizers share: groups, options, work lists, checkpoints, the step."""
