"""The optimizers of dense parameters that servers run: those of torch, and one of Fleet."""
