"""One module a host framework (DDP, FSDP2, Trainer). Empty so far: a host that calls `torch.compile` works by name."""
