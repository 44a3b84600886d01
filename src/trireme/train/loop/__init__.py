"""The training loop: read, plan, pull, compute, push."""
