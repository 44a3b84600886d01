"""What a fit calls after steps and epochs: early stopping, the best checkpoint, loggers."""
