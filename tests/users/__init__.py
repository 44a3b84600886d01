"""Scripts as a new user writes them, and tests that run them."""
