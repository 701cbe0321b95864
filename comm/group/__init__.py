"""The process group: its construction, the calls that it delegates, and its functions other than collectives."""
