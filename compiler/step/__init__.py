"""One call of a region: the choice of its route, and the outputs that are handed out."""
