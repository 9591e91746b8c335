"""Files of runs, each whole or not there: records, checkpoints, weights, locks, TOML."""
