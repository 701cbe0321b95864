"""Only the head, only embeddings, only biases are trained: outputs of a call without backward are used after a step."""

import torch
from tiny import TIMES, batch, bert, llama, norms
from transformers import BertForMaskedLM

torch.manual_seed(0)
history = []
for part in ("lm_head", "embed_tokens", "bias"):
    model = bert(BertForMaskedLM, tie_word_embeddings=False) if part == "bias" else llama()
    for name, weight in model.named_parameters():
        weight.requires_grad_(part in name and "LayerNorm" not in name)
    optimizer = torch.optim.SGD([w for w in model.parameters() if w.requires_grad], lr=0.1)
    for step in range(6 * TIMES):
        ids, mask, labels = batch(step)
        first = model(input_ids=ids, attention_mask=mask, labels=labels)
        ids2, mask2, labels2 = batch(step + 50)
        loss = model(input_ids=ids2, attention_mask=mask2, labels=labels2).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = first.loss
        if step >= 3 * TIMES:
            loss = loss + 0.1 * first.logits[mask.bool()].pow(2).mean()
        try:
            loss.backward()
        except RuntimeError:
            history.append(-1)
        history.append([loss.item(), *[0 if w.grad is None else w.grad.norm() for w in model.parameters()]])
        optimizer.step()
    history.append(norms(model))
