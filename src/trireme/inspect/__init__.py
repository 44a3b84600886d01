"""`trireme inspect`: the content of a checkpoint or an export, read in batches, without servers."""
