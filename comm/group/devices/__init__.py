"""Collectives of device tensors that move by other ways than gloo or NCCL. Loaded only where GPUs ask for them."""
