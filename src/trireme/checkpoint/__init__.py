"""Checkpoints: their files, and the parts of servers and workers in saving and loading."""
