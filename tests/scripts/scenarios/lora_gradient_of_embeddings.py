"""LoRA whose script asks for the gradient of the embedding's output, which requires gradients by a hook only."""

import torch
from peft import LoraConfig, get_peft_model
from tiny import TIMES, batch, llama, norms

torch.manual_seed(0)
model = get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.0, init_lora_weights=False))
model.enable_input_require_grads()
optimizer = torch.optim.SGD(filter(lambda weight: weight.requires_grad, model.parameters()), lr=0.5)
history = []
for step in range(4 * TIMES):
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels, output_hidden_states=True)
    embedded = outputs.hidden_states[0]
    (gradient,) = torch.autograd.grad(outputs.loss, embedded, retain_graph=True)
    optimizer.zero_grad()
    outputs.loss.backward()
    optimizer.step()
    history.append([outputs.loss.item(), float(embedded.requires_grad), *gradient.norm(dim=-1).flatten().tolist()])
history.append(norms(model))
