"""One module a host framework, attached when the host is imported: see `deepytorch.__init__`."""
