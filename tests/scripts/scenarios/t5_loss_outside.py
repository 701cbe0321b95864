"""T5 with a loss outside that counts the decoder's pads."""

import torch
import torch.nn.functional as F
from tiny import batch, norms, t5

torch.manual_seed(0)
model = t5()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
history = []
for step in range(3):
    ids, mask, _ = batch(step)
    into, into_mask, _ = batch(step + 50, length=10)
    started = F.pad(into, (1, 0))[:, :-1]
    logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=started).logits
    loss = F.cross_entropy(logits.flatten(0, 1), into.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
