"""The command `trireme`: one file per subcommand, which loads torch only when it runs."""
