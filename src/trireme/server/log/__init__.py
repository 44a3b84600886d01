"""The log of a server, its snapshots, and recovery from both."""
