"""The files of a checkpoint: manifest, rows, blocks."""
