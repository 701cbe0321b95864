"""Prompt tuning by PEFT: five virtual tokens before each row, of a frozen model."""

import torch
from peft import PromptTuningConfig, get_peft_model
from tiny import TIMES, batch, llama, norms

DEFAULT = True
EXPECT = "packed"

torch.manual_seed(0)
model = get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5))
optimizer = torch.optim.SGD(filter(lambda weight: weight.requires_grad, model.parameters()), lr=1.0)
history = []
for step in range(5 * TIMES):
    ids, mask, labels = batch(step)
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
