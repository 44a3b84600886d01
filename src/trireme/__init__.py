"""Trireme: a parameter server for PyTorch."""
