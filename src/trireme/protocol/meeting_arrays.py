"""Who gets the arrays that workers bring to a meeting."""

MEETING_ARRAYS = ALL, FIRST, SUM = ("all", "first", "sum")
"""all: every worker gets those of all. first: worker 0 alone does. sum: worker 0 alone gets their
sum, added in the order of the workers.
"""
