"""A model class that overrides __call__, to divide logits by a temperature."""

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms
from transformers import LlamaForCausalLM


class Tempered(LlamaForCausalLM):
    def __call__(self, *args, **kwargs):
        outputs = super().__call__(*args, **kwargs)
        outputs.logits = outputs.logits / 0.8
        return outputs


torch.manual_seed(0)
model = llama(Tempered)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    logits = model(input_ids=ids, attention_mask=mask).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
