"""Trajectories of every optimizer, recorded once and compared bit by bit."""
