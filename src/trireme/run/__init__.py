"""Training and inference from a YAML file with PaddleRec's keys: `trireme run -m config.yaml`."""
