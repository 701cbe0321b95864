"""A model is changed after half of its steps, in another way in each case."""

import pickle
import warnings

import torch
from peft import LoraConfig, get_peft_model
from tiny import TIMES, VOCAB, batch, bert, case, chosen, gpt2, llama, norms, with_size
from torch import nn
from transformers import BertForMaskedLM


def sgd(model, lr=0.1):
    return torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=lr)


@case
def freeze_midway(model, optimizer):
    """The embeddings and the first layer are frozen."""
    model.get_input_embeddings().requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model, optimizer


@case
def unfreeze_midway(model, optimizer):
    """Only the head is trained at first; then everything is."""
    model.requires_grad_(True)
    rest = [weight for name, weight in model.named_parameters() if "lm_head" not in name]
    optimizer.add_param_group({"params": rest, "lr": 0.05})
    return model, optimizer


@case
def add_lora_midway(model, optimizer):
    """LoRA adapters are added to a model that was trained whole."""
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(model, config)
    return model, sgd(model, lr=1.0)


@case
def tie_weights_midway(model, optimizer):
    """Head and embeddings become one."""
    model.lm_head.weight = model.get_input_embeddings().weight
    return model, sgd(model)


@case
def untie_weights_midway(model, optimizer):
    """Head and embeddings are one, and come apart."""
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model, sgd(model)


@case
def layer_added_midway(model, optimizer):
    """A layer is dropped, and the head is replaced by one of two layers."""
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    model.lm_head = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, VOCAB))
    return model, sgd(model)


@case
def resize_embeddings_midway(model, optimizer):
    """The vocabulary grows, a new id is used, and a new optimizer is made."""
    model.resize_token_embeddings(104, mean_resizing=False)
    return model, sgd(model)


@case
def attention_changed_midway(model, optimizer):
    """The implementation of attention is changed."""
    model.set_attn_implementation("eager")
    return model, optimizer


@case
def dropout_changed_midway(model, optimizer):
    """One dropout goes from nothing to everything (both can be compared)."""
    model.bert.encoder.layer[1].output.dropout.p = 1.0
    return model, optimizer


@case
def forward_replaced(model, optimizer):
    """The model's forward is replaced on the instance."""
    forward = model.forward

    def louder(*args, **kwargs):
        outputs = forward(*args, **kwargs)
        outputs.loss = outputs.loss * 2 + 0.1 * outputs.logits.pow(2).mean()
        return outputs

    model.forward = louder
    return model, optimizer


@case
def part_traced_midway(model, optimizer):
    """A part of the model is replaced by its torch.jit trace."""
    warnings.simplefilter("ignore")
    model.model.layers[0].mlp = torch.jit.trace(model.model.layers[0].mlp, torch.randn(4, 16, 32))
    return model, optimizer


@case
def pickled_midway(model, optimizer):
    """Model and optimizer are pickled, and training goes on with what was read."""
    return pickle.loads(pickle.dumps((model, optimizer)))


torch.manual_seed(0)
history, models = [], {untie_weights_midway: gpt2, dropout_changed_midway: lambda: bert(BertForMaskedLM)}
model = models.get(chosen(), llama)()
if chosen() is unfreeze_midway:
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
optimizer = sgd(model)
for step in range(4 * TIMES):
    if step == 2 * TIMES:
        outputs = loss = None  # a graph that is still there would keep an old shape
        model, optimizer = chosen()(model, optimizer)
    ids, mask, labels = batch(step)
    if model.get_input_embeddings().num_embeddings > VOCAB:
        ids[:, 1], labels[:, 1] = 100, 100
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    loss = with_size(outputs)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), sum(weight.grad is not None for weight in model.parameters())])
history.append(norms(model))
