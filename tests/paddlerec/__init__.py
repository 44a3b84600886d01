"""Configurations and reader scripts in PaddleRec's style, as its users bring them."""
