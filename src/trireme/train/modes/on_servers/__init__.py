"""What the modes of a job with servers share."""
