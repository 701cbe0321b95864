"""A recurrent tagger on packed sequences, padded again for its loss."""

import torch
from tiny import VOCAB, batch, norms
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.read = nn.LSTM(16, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 5)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.read(packed)[0], batch_first=True, total_length=ids.size(1))
        return self.head(hidden)


torch.manual_seed(0)
model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    logits = model(ids, mask.sum(1))
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten() % 5)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
