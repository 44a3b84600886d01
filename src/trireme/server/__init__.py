"""One server: the tables and blocks that it holds, the requests that it answers, its log."""
