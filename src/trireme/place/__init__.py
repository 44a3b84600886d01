"""Which kind of machine computes which part of a model, and how many of each: `trireme place`."""
