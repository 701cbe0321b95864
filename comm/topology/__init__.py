"""Hosts and links: what there is, what it costs, measured or assumed."""
