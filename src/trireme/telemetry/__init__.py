"""What a process tells of itself: instruments that count, and the endpoint where Prometheus reads
them. Knows no tables.
"""
