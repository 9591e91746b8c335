"""Files of runs, each complete or absent: records, checkpoints, weights, locks, TOML."""
