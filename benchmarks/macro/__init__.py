"""Whole jobs in real processes: examples per second, and the quality reached."""
