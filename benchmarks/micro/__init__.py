"""One loop of one concept, in this process or between two."""
