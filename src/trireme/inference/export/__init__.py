"""Writing a trained model for inference."""
