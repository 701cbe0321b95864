"""The process group: how it is made, what it hands on, and what it can do beside collectives."""
