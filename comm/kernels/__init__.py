"""Kernels of the communication layer: gradients into buckets and back, all-reduce over symmetric memory."""
