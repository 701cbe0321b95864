"""A mixture of experts, whose auxiliary loss looks at the routing of tokens."""

import torch
from tiny import VOCAB, batch, norms
from transformers import MixtralConfig, MixtralForCausalLM

torch.manual_seed(0)
config = MixtralConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    max_position_embeddings=64,
    initializer_range=0.15,
    output_router_logits=True,
    router_aux_loss_coef=0.1,
)
model = MixtralForCausalLM(config).train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    loss = outputs.loss + 1e-2 * outputs.router_logits[-1].logsumexp(-1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), outputs.aux_loss.item()])
history.append(norms(model))
