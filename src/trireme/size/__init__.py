"""`trireme size`: memory and disk that a table will need."""
