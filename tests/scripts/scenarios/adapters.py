"""PEFT's adapters on a frozen Llama: with gradient checkpointing, in turns, and as learned prompts."""

import torch
from peft import LoraConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from tiny import TIMES, batch, case, chosen, llama, norms

LORA = {"task_type": "CAUSAL_LM", "r": 4, "lora_dropout": 0.0, "init_lora_weights": False}


def checkpointed(model, is_reentrant):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": is_reentrant})
    model.enable_input_require_grads()  # the recipe, since the embedding is frozen
    return model


@case(default=True, expect="packed")
def lora_with_checkpoints():
    """The usual recipe."""
    return checkpointed(get_peft_model(llama(), LoraConfig(**LORA)), False)


@case(expect="packed")
def lora_with_reentrant_checkpoints():
    """The same with checkpoints of the older kind."""
    return checkpointed(get_peft_model(llama(), LoraConfig(**LORA)), True)


@case(expect="packed")
def dora_with_checkpoints():
    """DoRA, which cuts graphs."""
    return checkpointed(get_peft_model(llama(), LoraConfig(**LORA, use_dora=True)), False)


@case(expect="packed")
def lora_in_turns():
    """Two adapters, of which each step trains another one."""
    model = get_peft_model(llama(), LoraConfig(**LORA), adapter_name="even")
    model.add_adapter("odd", LoraConfig(**LORA))
    for name, weight in model.named_parameters():
        weight.requires_grad_("lora" in name)
    return model


@case(default=True, expect="packed")
def prompt_tuning_by_peft():
    """Five virtual tokens before each row."""
    return get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5))


@case(expect="packed")
def p_tuning_by_peft():
    """Virtual tokens that an MLP makes."""
    config = PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=5, encoder_hidden_size=16)
    return get_peft_model(llama(), config)


torch.manual_seed(0)
model = chosen()()
optimizer = torch.optim.SGD(filter(lambda weight: weight.requires_grad, model.parameters()), lr=0.2)
history = []
for step in range(5 * TIMES):
    if "odd" in model.peft_config:
        model.set_adapter(("even", "odd")[step % 2])
    ids, mask, labels = batch(step)
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    history.append([loss.item(), *(each.grad.norm().item() for each in model.parameters() if each.grad is not None)])
    optimizer.step()
history.append(norms(model))
