"""Where things are: parameters cut into tiles, tiles stacked into buckets, pieces of memory."""
