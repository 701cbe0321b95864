"""Gradients of a data-parallel module: planned into buckets, and sent while the backward runs."""
