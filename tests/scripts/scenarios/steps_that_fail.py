"""A step ends in an error, or with a loss that is not finite; the script goes on with the next batch."""

import torch
from tiny import batch, case, chosen, llama, norms, with_size


@case
def exception_for_bad_batch(step, given):
    """A batch has a token outside of the vocabulary."""
    if step == 1:
        given["input_ids"][0, 0] = 1000


@case
def exception_in_forward(step, given):
    """A forward fails in the middle of a layer."""
    failing[:] = [ValueError("out of memory, or so")] if step == 2 else []


@case
def interrupt_in_forward(step, given):
    """A forward is interrupted from the keyboard, in its first step and in a later one."""
    failing[:] = [KeyboardInterrupt] if step in (0, 3) else []


@case
def nan_skipping(step, given):
    """One batch has no label that counts: its loss is the mean over nothing, and the step is skipped."""
    if step == 1:
        given["labels"][:] = -100


def fail(module, args, output):
    for error in failing:
        raise error


torch.manual_seed(0)
model, failing, history = llama(), [], []
if chosen() in (exception_in_forward, interrupt_in_forward):
    model.model.layers[1].mlp.register_forward_hook(fail)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    given = dict(zip(("input_ids", "attention_mask", "labels"), batch(step), strict=True))
    chosen()(step, given)
    try:
        outputs = model(**given)
    except (IndexError, ValueError, KeyboardInterrupt):
        history.append(-1.0)
        continue
    loss = with_size(outputs)
    if torch.isfinite(loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    history.append([loss.item(), outputs.logits.mean().item()])
history.append(norms(model))
