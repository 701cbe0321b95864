"""P-tuning by PEFT: virtual tokens that an MLP makes, before each row of a frozen model."""

import torch
from peft import PromptEncoderConfig, get_peft_model
from tiny import TIMES, batch, llama, norms

EXPECT = "packed"

torch.manual_seed(0)
config = PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=5, encoder_hidden_size=16)
model = get_peft_model(llama(), config)
optimizer = torch.optim.SGD(filter(lambda weight: weight.requires_grad, model.parameters()), lr=0.1)
history = []
for step in range(5 * TIMES):
    ids, mask, labels = batch(step)
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
