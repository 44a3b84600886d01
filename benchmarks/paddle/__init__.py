"""Scripts that run under Paddle's Python, to be compared with; each prints a line of JSON."""
