"""The files of a checkpoint: manifest, rows, blocks. Servers, workers and commands use them."""
