"""A process of a job: the cluster object, connecting, embedded tables, serving."""
