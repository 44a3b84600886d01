"""Saves and loads on the worker that calls them."""
