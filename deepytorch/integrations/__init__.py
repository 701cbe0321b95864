"""Integrations with host frameworks: one module a host, attached when it is imported (see `deepytorch.__init__`)."""
