"""nn.TransformerEncoder in a model that averages over tokens by itself."""

import torch
import torch.nn.functional as F
from tiny import VOCAB, batch, norms


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, 32, padding_idx=0)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(32, 3)

    def forward(self, ids, mask):
        hidden = self.encoder(self.embed(ids), src_key_padding_mask=~mask.bool())
        return self.head((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


torch.manual_seed(0)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    loss = F.cross_entropy(model(ids, mask), ids[:, 1] % 3)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
