"""Where a row is, by the numbers of `ps.look`."""

PLACES = NONE, MEMORY, SSD = "none", "memory", "ssd"
