"""LoRA, gradient checkpointing and bf16 autocast, in a process that has run for a while when training begins."""

import time

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

torch.manual_seed(0)
model = Qwen2ForCausalLM(
    Qwen2Config(
        vocab_size=1000, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )
)  # fmt: skip
model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM"))
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model.enable_input_require_grads()
model.train()
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
time.sleep(60)  # in place of loading a model and tokenizing rows
while True:
    lengths, ids = torch.randint(6, 25, (8,)), torch.randint(3, 1000, (8, 25))
    mask = (torch.arange(25) < lengths[:, None]).long()
    with torch.autocast("cpu", torch.bfloat16):
        labels = ids.masked_fill(mask == 0, -100)
        loss = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
