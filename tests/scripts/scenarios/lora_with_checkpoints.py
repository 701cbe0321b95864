"""LoRA with gradient checkpointing, the usual recipe: the frozen embedding's output is made to require gradients."""

import torch
from peft import LoraConfig, get_peft_model
from tiny import TIMES, batch, llama, norms

DEFAULT = True
EXPECT = "packed"

torch.manual_seed(0)
config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.0, init_lora_weights=False)
model = get_peft_model(llama(), config)
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model.enable_input_require_grads()
optimizer = torch.optim.SGD(filter(lambda weight: weight.requires_grad, model.parameters()), lr=0.5)
history = []
for step in range(5 * TIMES):
    ids, mask, labels = batch(step)
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    history.append([loss.item(), *(each.grad.norm().item() for each in model.parameters() if each.requires_grad)])
    optimizer.step()
history.append(norms(model))
