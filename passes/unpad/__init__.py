"""Stripping padding: the proof that nobody sees what stands at pads, and the rewrite to one axis of tokens."""
