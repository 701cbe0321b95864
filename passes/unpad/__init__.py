"""Stripping of padding: the proof that values at pads are never seen, and the rewrite to one axis of tokens."""
