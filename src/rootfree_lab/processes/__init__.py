"""Processes: work side by side, and signals that ask to stop."""
