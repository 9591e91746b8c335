"""What is seen of a run: progress, logs, warnings, time and memory."""
