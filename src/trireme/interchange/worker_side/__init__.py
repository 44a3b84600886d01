"""Imports and exports on the worker that calls them."""
