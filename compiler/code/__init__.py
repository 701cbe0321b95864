"""The way from a graph to compiled code: here, in another process or from an earlier run, with reduced gradients."""
