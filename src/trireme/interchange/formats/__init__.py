"""Formats of other systems: Fleet, Parquet, NumPy."""
