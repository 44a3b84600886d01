"""The most processes and streams of a job. The launcher reads this too: it loads nothing else."""

WORKERS_MAX = 4096
"""The coordinator keeps a lease and the steps of each."""

SERVERS_MAX = 4096
"""Each has at least one of a table's buckets: see NUM_BUCKETS of the core."""

STREAMS_MAX = 4096
"""Servers and checkpoints keep a position for each."""

COMPUTE_WORKERS_MAX = 4096
"""The coordinator tells all their addresses to a worker that joins."""

SECONDS_MAX = 1e8
"""Of a timeout: three years. Sums of some of them must be times that the system knows."""
