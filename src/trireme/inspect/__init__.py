"""`trireme inspect`: what is in a checkpoint or an export, read piece by piece, without servers."""
