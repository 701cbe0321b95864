"""One call of a region: which route it takes, and what is handed out of it."""
