"""What this machine offers to a job, and what would prevent one."""
