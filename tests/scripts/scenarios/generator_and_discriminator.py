"""ELECTRA-like: a generator fills masked tokens, a discriminator says at every position which ones were filled."""

import torch
import torch.nn.functional as F
from tiny import batch, bert, norms
from transformers import BertForMaskedLM, BertForTokenClassification

torch.manual_seed(0)
generator, discriminator = bert(BertForMaskedLM), bert(BertForTokenClassification, num_labels=1)
optimizer = torch.optim.SGD([*generator.parameters(), *discriminator.parameters()], lr=0.05)
history = []
for step in range(3):
    ids, mask, labels = batch(step)
    hidden = torch.zeros_like(ids, dtype=torch.bool)
    hidden[:, 1:16:4] = True
    hidden &= mask.bool()
    outputs = generator(
        input_ids=ids.masked_fill(hidden, 2), attention_mask=mask, labels=labels.masked_fill(~hidden, -100)
    )
    filled = torch.where(hidden, outputs.logits.argmax(-1), ids)
    told = discriminator(input_ids=filled, attention_mask=mask).logits.squeeze(-1)
    loss = outputs.loss + 5 * F.binary_cross_entropy_with_logits(told, (filled != ids).float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), filled])
history.append([norms(generator), norms(discriminator)])
