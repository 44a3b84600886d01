"""Mode hybrid: rows through the servers, dense parameters by all-reduce among the workers."""
