"""From a graph to compiled code: here, in another process, or from an earlier run; with gradients reduced in it."""
