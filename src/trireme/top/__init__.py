"""The view of `trireme top`: a running job in the terminal."""
