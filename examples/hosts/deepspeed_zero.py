"""DeepSpeed ZeRO, with one line more: `torchrun --nproc-per-node 2 examples/hosts/deepspeed_zero.py [STAGE]`.

On CPU set DS_ACCELERATOR=cpu. `engine.compile(backend="deepytorch")` says the same about the engine's module. ZeRO-3
cuts every graph at its hooks: padding is then stripped at model entry.
"""

import deepytorch  # the one line

import sys

import deepspeed
import torch
import torch.distributed as dist
from text import padded_batches, small_llama

stage = int(sys.argv[1]) if len(sys.argv) > 1 else 3
deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
model = small_llama()
config = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": stage},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for step, batch in enumerate(padded_batches(20, dist.get_rank())):
    loss = engine(**{name: value.to(engine.device) for name, value in batch.items()}).loss
    engine.backward(loss)
    engine.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
if dist.get_rank() == 0:
    print(deepytorch.report())
dist.destroy_process_group()
