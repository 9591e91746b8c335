"""Parameters and state on many ranks: nearly all code that uses torch.distributed."""
