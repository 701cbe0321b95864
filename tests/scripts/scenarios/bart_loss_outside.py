"""Bart with a mask for its decoder; the loss ignores pads, and the encoder's last states are regularised."""

import torch
import torch.nn.functional as F
from tiny import bart, batch, norms

torch.manual_seed(0)
model = bart()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
history = []
for step in range(3):
    ids, mask, _ = batch(step)
    into, into_mask, labels = batch(step + 50, length=10)
    outputs = model(input_ids=ids, attention_mask=mask, decoder_input_ids=into, decoder_attention_mask=into_mask)
    loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss = loss + 0.1 * outputs.encoder_last_hidden_state.abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
