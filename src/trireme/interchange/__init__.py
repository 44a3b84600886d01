"""Tables from and for other systems: Fleet's text, Parquet."""
