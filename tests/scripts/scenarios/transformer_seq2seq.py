"""nn.Transformer with masks for both sides; the loss ignores the decoder's pads."""

import torch
import torch.nn.functional as F
from tiny import VOCAB, batch, norms


class Translator(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, 32)
        self.body = torch.nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True)
        self.head = torch.nn.Linear(32, VOCAB)

    def forward(self, ids, mask, into, into_mask):
        causal = torch.ones(into.size(1), into.size(1), dtype=torch.bool).triu(1)
        hidden = self.body(
            self.embed(ids),
            self.embed(into),
            tgt_mask=causal,
            src_key_padding_mask=mask == 0,
            tgt_key_padding_mask=into_mask == 0,
            memory_key_padding_mask=mask == 0,
        )
        return self.head(hidden)


torch.manual_seed(0)
model = Translator()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(3):
    ids, mask, _ = batch(step)
    into, into_mask, labels = batch(step + 50, length=12)
    logits = model(ids, mask, into, into_mask)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) + 0.1 * logits[:, -1].pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
