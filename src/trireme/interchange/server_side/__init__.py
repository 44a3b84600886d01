"""A server's share of imports and exports."""
