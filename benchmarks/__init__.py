"""Benchmarks of Trireme: `python -m benchmarks --help`. See results/README.md."""
