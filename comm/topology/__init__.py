"""Hosts and links: their structure and their costs, measured or assumed."""
