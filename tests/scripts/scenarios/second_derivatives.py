"""Losses with gradients of gradients in them, on a Llama with eager attention, which has second derivatives."""

import torch
from tiny import case, chosen, llama, next_tokens, train


@case
def gradient_penalty_embeddings(model, ids, mask, labels):
    """A penalty on the gradient with respect to the embeddings: autograd.grad with create_graph."""
    embedded = model.get_input_embeddings()(ids)
    loss = next_tokens(model(inputs_embeds=embedded, attention_mask=mask).logits, labels)
    (slope,) = torch.autograd.grad(loss, embedded, create_graph=True)
    yield loss + slope.pow(2).sum()


@case
def gradient_penalty_model_loss(model, ids, mask, labels):
    """A penalty on the gradient of the model's own loss with respect to its weights."""
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    yield loss + 0.01 * sum(each.pow(2).sum() for each in slopes)


@case
def hessian_vector_product(model, ids, mask, labels):
    """A Hessian-vector product is logged each step."""
    weight = model.model.layers[0].mlp.up_proj.weight
    loss = next_tokens(model(input_ids=ids, attention_mask=mask).logits, labels)
    (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
    (product,) = torch.autograd.grad(slope.sum(), weight, retain_graph=True)
    yield loss
    yield product.norm().item()


torch.manual_seed(0)
model = llama(attn_implementation="eager")
history = train(model, chosen(), torch.optim.SGD(model.parameters(), lr=0.05), steps=3)
