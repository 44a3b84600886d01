"""Passes on devices over several workers: each has the rows of its buckets on its device, and all
make each step together.
"""
