"""Passes on a device: the rows that data in memory needs are in blocks, and trained there."""
