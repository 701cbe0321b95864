"""State dictionaries and the whole model go through torch.save and torch.load; names of entries are counted."""

import io

import torch
from tiny import batch, llama, norms


def through_file(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


torch.manual_seed(0)
model = llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
history = []
for step in range(4):
    if step == 1:
        state, moments = through_file((model.state_dict(), optimizer.state_dict()))
        model = llama()
        history.append([len(state), len(model.load_state_dict(state).missing_keys)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer.load_state_dict(moments)
    if step == 3:
        model = through_file(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    outputs.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    history.append([outputs.loss.item(), outputs.logits.mean().item()])
history.append(norms(model))
