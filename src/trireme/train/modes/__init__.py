"""The consistency modes of `Strategy`, one file or folder each."""
