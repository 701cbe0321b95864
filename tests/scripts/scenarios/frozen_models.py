"""A model that is not trained beside one that is: a teacher, and what a script may do with it midway."""

import torch
import torch.nn.functional as F
from tiny import TIMES, batch, case, chosen, llama, norms

STEPS = 10 * TIMES


def teach(outputs, expected, mask):
    """The divergence from the teacher at tokens."""
    student, teacher = outputs.log_softmax(-1), expected.log_softmax(-1)
    each = F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)
    return (each * mask).sum() / mask.sum()


def ask(model, ids, mask):
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).logits


@case(default=True, expect="packed")
def teacher(step, student, teacher, ids, mask):
    """Distillation: the teacher's logits are read at tokens."""
    return teach(student, ask(teacher, ids, mask), mask)


@case
def teacher_averages_weights(step, student, teacher, ids, mask):
    """A mean teacher, whose weights change in place behind each step, compared at all positions now and then."""
    expected = ask(teacher, ids, mask)
    with torch.no_grad():
        for mean, weight in zip(teacher.parameters(), model.parameters(), strict=True):
            mean.data.lerp_(weight, 0.1)
    return teach(student, expected, mask) if step % 3 else F.mse_loss(student, expected)


@case
def teacher_keeps_logits(step, student, teacher, ids, mask):
    """Logits are kept over steps, and read whole when the teacher has other weights."""
    kept.append(ask(teacher, ids, mask))
    if step % 4 == 3:
        history.append([each.sum().item() for each in kept])
        kept.clear()
        teacher.load_state_dict({name: value * 1.01 for name, value in teacher.state_dict().items()})
    return teach(student, ask(teacher, ids, mask), mask)


@case
def teacher_is_trained_later(step, student, teacher, ids, mask):
    """After half of the steps both learn from each other."""
    if step == STEPS // 2:
        optimizers.append(torch.optim.SGD(teacher.train().parameters(), lr=0.1))
    if len(optimizers) == 1:
        return teach(student, ask(teacher, ids, mask), mask)
    other = teacher(input_ids=ids, attention_mask=mask).logits
    return teach(student, other.detach(), mask) + teach(other, student.detach(), mask)


@case
def teacher_passes_gradients_on(step, student, teacher, ids, mask):
    """The student's words, as a mixture of embeddings, are judged by a frozen model: gradients go through it."""
    if step % 2:
        return teach(student, ask(teacher, ids, mask), mask)
    mixed = student.softmax(-1) @ teacher.get_input_embeddings().weight.detach()
    judged = teacher(inputs_embeds=mixed, attention_mask=mask).logits.log_softmax(-1)
    return -(judged.max(-1).values * mask).sum() / mask.sum()


@case
def teacher_hooked_midway(step, student, teacher, ids, mask):
    """A hook of the script's sees what each layer of the teacher returns, at all positions."""
    if step == STEPS // 2:
        teacher.model.layers[0].register_forward_hook(lambda *given: history.append(given[2].abs().sum().item()))
    return teach(student, ask(teacher, ids, mask), mask)


torch.manual_seed(0)
learn = chosen()
model, judge = llama(), llama().eval().requires_grad_(False)
if learn.__name__ == "teacher_is_trained_later":
    judge.requires_grad_(True)
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
history, kept = [], []
for step in range(STEPS):
    ids, mask, _ = batch(step, side=("right", "left", "mixed")[step % 3])
    loss = learn(step, model(input_ids=ids, attention_mask=mask).logits, judge, ids, mask)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    history.append(loss.item())
history.append([norms(model), norms(judge)])
