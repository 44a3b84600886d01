"""The page of `trireme console`: a running job in a browser."""
