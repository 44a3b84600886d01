"""`trireme size`: what a table costs in memory and on disk before it is made."""
