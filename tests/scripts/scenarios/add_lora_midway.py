"""LoRA adapters are added after two steps of full training."""

import torch
from peft import LoraConfig, get_peft_model
from tiny import TIMES, batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4 * TIMES):
    if step == 2 * TIMES:
        config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
        model = get_peft_model(model, config)
        optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=1.0)
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    loss = outputs.loss + 0.1 * outputs.logits.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
