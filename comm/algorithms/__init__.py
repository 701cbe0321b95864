"""Algorithms for collectives, the cost of each, and the choice among them."""
