"""A BERT with a pooler is evaluated between its training steps: its calls are replaced for evaluation alone."""

import torch
from tiny import TIMES, batch, bert, norms
from transformers import BertForSequenceClassification

EXPECT = "packed"

torch.manual_seed(0)
model = bert(BertForSequenceClassification, num_labels=3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(5 * TIMES):
    ids, mask, _ = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=ids[:, 0] % 3)
    optimizer.zero_grad()
    outputs.loss.backward()
    optimizer.step()
    model.eval()
    found = [outputs.loss.item()]
    with torch.no_grad():
        for number in range(2):
            ids, mask, _ = batch(100 + number)
            found += model(input_ids=ids, attention_mask=mask).logits.flatten().tolist()
    model.train()
    history.append(found)
history.append(norms(model))
