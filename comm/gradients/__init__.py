"""Gradients of a data-parallel module: planned into buckets, sent while the backward runs."""
