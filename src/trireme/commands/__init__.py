"""The command `trireme`: one file per command."""
