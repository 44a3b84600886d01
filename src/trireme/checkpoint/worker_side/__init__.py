"""Saves and loads as the worker that asks for them sees them."""
