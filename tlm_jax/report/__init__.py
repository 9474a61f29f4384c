"""One HTML page about one or more runs."""
