"""Label smoothing, outside of the model, pads ignored."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    logits = model(input_ids=ids, attention_mask=mask).logits
    loss = criterion(logits[..., :-1, :].permute(0, 2, 1), labels[..., 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
