"""SimCSE: the same batch goes through the encoder twice (with noise on the embeddings instead of dropout)."""

import torch
import torch.nn.functional as F
from tiny import batch, bert, norms

torch.manual_seed(0)
model = bert()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    one = model(input_ids=ids, attention_mask=mask).last_hidden_state.mean(1)
    noisy = model.embeddings.word_embeddings(ids) + 0.01 * torch.randn(4, 16, 32)
    two = model(inputs_embeds=noisy, attention_mask=mask).last_hidden_state.mean(1)
    similar = F.cosine_similarity(one[:, None], two[None], dim=-1) / 0.5
    loss = F.cross_entropy(similar, torch.arange(4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
