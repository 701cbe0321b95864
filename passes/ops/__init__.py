"""The operators that passes put into graphs, each with its reference and its form for every device."""
