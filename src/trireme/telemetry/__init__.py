"""Metrics of a process, and the endpoint where Prometheus reads them. Knows no tables."""
