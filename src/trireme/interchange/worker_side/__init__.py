"""Imports and exports as the worker that asks for them sees them."""
