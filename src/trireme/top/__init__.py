"""`trireme top`: a running job in the terminal."""
