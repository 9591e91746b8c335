"""Parameters and state on many ranks: with `shell/batch_size.py` and the recorders the only code
that knows torch.distributed."""
