"""Two ranks train a mixture of experts with its router's loss under DistributedDataParallel."""

import torch
import torch.distributed as dist
from tiny import VOCAB, batch, train
from torch.nn.parallel import DistributedDataParallel
from transformers import MixtralConfig, MixtralForCausalLM

RANKS = 2


def step(model, ids, mask, labels):
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    yield outputs.loss
    yield outputs.aux_loss.item()


torch.manual_seed(0)
dist.init_process_group("gloo")
config = MixtralConfig(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64, initializer_range=0.15,
    output_router_logits=True, router_aux_loss_coef=0.1,
)  # fmt: skip
model = DistributedDataParallel(MixtralForCausalLM(config).train())
history = train(
    model, step, steps=5, batches=lambda number: batch(10 * dist.get_rank() + number, length=12 + number % 3)
)
dist.destroy_process_group()
