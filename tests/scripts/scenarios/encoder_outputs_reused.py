"""The encoder runs once, and its outputs go to the decoder twice."""

import torch
from tiny import batch, norms, t5

torch.manual_seed(0)
model = t5()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
history = []
for step in range(3):
    ids, mask, _ = batch(step)
    encoded = model.get_encoder()(input_ids=ids, attention_mask=mask)
    loss = 0.0
    for part in range(2):
        _, _, labels = batch(step + 50 + part, length=10)
        loss = loss + model(encoder_outputs=encoded, attention_mask=mask, labels=labels).loss
    loss = loss + 0.1 * encoded.last_hidden_state.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
