"""Rows outside the core: its tables by schema, and the layouts of rows in files and snapshots."""
