"""Reference scripts that run under Paddle's Python; each prints a line of JSON."""
