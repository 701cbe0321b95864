"""DPO on LoRA: the reference is the same model with its adapters switched off."""

import torch
from peft import LoraConfig, get_peft_model
from tiny import batch, llama, norms

torch.manual_seed(0)
config = LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
model = get_peft_model(llama(), config)
optimizer = torch.optim.SGD(filter(lambda weight: weight.requires_grad, model.parameters()), lr=0.1)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    with torch.no_grad(), model.disable_adapter():
        before = model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)
    now = model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)
    gained = (now - before).gather(-1, ids.roll(-1, 1)[..., None]).squeeze(-1)
    gained = (gained * mask).sum(-1)
    loss = -torch.nn.functional.logsigmoid(gained[:2] - gained[2:]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), gained.tolist()])
history.append(norms(model))
