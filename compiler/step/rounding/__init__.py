"""Packed steps of few sizes, for which CUDA graphs are recorded. Loaded only where they are asked for."""
