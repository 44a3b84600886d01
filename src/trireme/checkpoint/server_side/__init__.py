"""A server's share of saves and loads."""
