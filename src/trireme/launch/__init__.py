"""The role of a process, and the start of all processes of a job on one machine."""
