"""Online learning: passes of data as they come."""
