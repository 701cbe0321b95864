"""Between the steps the model is evaluated, in evaluation mode, with and without reading logits, and its pads too."""

import torch
import torch.nn.functional as F
from tiny import TIMES, batch, llama, norms

DEFAULT = True

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4 * TIMES):
    ids, mask, labels = batch(step, side="mixed")
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.eval()
    found = [loss.item()]
    with torch.no_grad():
        for number in range(3):
            ids, mask, labels = batch(100 + number)
            outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
            taken = outputs.logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            found += [outputs.loss.item(), *(taken * mask[:, 1:]).sum(1).tolist()]
    with torch.inference_mode():
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
        shifted = labels[:, 1:].flatten()
        found.append(F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), shifted, ignore_index=-100).item())
    model.train()
    history.append(found)
history.append(norms(model))
