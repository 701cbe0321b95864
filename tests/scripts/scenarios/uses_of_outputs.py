"""A Llama is trained, and each case does something else with what it returns."""

import random

import torch
import torch.nn.functional as F
from tiny import case, chosen, llama, next_tokens, train, with_size


@case
def loss_outside_counting_pads(model, ids, mask, labels):
    """The loss stands outside of the model, and its labels count pads."""
    logits = model(input_ids=ids, attention_mask=mask).logits
    yield next_tokens(logits, ids)


@case(lowering="inductor")
def loss_outside_inductor(model, ids, mask, labels):
    """The loss stands outside of the model and counts pads; compiled by Inductor."""
    logits = model(input_ids=ids, attention_mask=mask).logits
    yield next_tokens(logits, ids)


@case(lowering="inductor", expect="packed")
def loss_inside_inductor(model, ids, mask, labels):
    """The model computes its own loss; compiled by Inductor."""
    yield model(input_ids=ids, attention_mask=mask, labels=labels).loss


@case
def labels_equal_inputs(model, ids, mask, labels):
    """The model's own loss, with the inputs as labels: pads are counted."""
    yield model(input_ids=ids, attention_mask=mask, labels=ids).loss


@case(expect="packed")
def labels_on_response(model, ids, mask, labels):
    """The model's own loss, with labels on the second half of each row."""
    prompts = mask.sum(1, keepdim=True) // 2
    labels = labels.masked_fill(torch.arange(16) < prompts, -100)
    yield model(input_ids=ids, attention_mask=mask, labels=labels).loss


@case
def loss_outside_indexing_tokens(model, ids, mask, labels):
    """Only the logits of tokens are taken, by indexing with the mask."""
    logits = model(ids, attention_mask=mask).logits
    taken = mask[:, 1:].bool()
    yield F.cross_entropy(logits[:, :-1][taken], ids[:, 1:][taken])


@case
def label_smoothing_by_hand(model, ids, mask, labels):
    """Label smoothing written out: the mean over the vocabulary is taken at all positions and masked late."""
    logs = -F.log_softmax(model(input_ids=ids, attention_mask=mask).logits[:, :-1], dim=-1)
    targets = labels[:, 1:].unsqueeze(-1)
    ignored = targets.eq(-100)
    sharp = logs.gather(-1, targets.clamp(min=0)).masked_fill_(ignored, 0.0)
    smooth = logs.sum(-1, keepdim=True).masked_fill_(ignored, 0.0)
    count = (~ignored).sum()
    yield 0.9 * sharp.sum() / count + 0.1 * smooth.sum() / (count * logs.size(-1))


@case
def caches_read(model, ids, mask, labels):
    """The keys and values of the last layer are regularised."""
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=True)
    last = outputs.past_key_values.layers[-1]
    yield outputs.loss + 0.1 * (last.keys.pow(2).mean() + last.values.pow(2).mean())
    yield last.keys.detach().norm()


@case
def logits_take_part_by_zero(model, ids, mask, labels):
    """All outputs take part in the loss, multiplied by zero, so that every parameter has a gradient."""
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels, output_hidden_states=True)
    yield outputs.loss + 0.0 * outputs.logits.sum() + 0.0 * outputs.hidden_states[-1].sum()


@case
def logits_sliced(model, ids, mask, labels):
    """The loss counts a slice of positions that begins among tokens and ends among pads."""
    logits = model(input_ids=ids, attention_mask=mask).logits[:, 4:12].contiguous()
    yield F.cross_entropy(logits.view(-1, logits.shape[-1]), ids[:, 5:13].reshape(-1))


@case
def logits_of_pads_set(model, ids, mask, labels):
    """Logits at pads are set to zero in place, and then averaged over all positions."""
    logits = model(input_ids=ids, attention_mask=mask).logits
    logits[mask == 0] = 0
    yield next_tokens(logits, ids) + logits.pow(2).mean()


@case
def random_numbers_stay(model, ids, mask, labels):
    """Random numbers that the script draws between steps, and the state of the generator, stay what they were."""
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    noise = torch.randn_like(outputs.logits)
    yield outputs.loss + 0.1 * (outputs.logits + noise).pow(2).mean()
    yield from (torch.rand(3), random.random(), torch.get_rng_state().double().mean())


# ---------------------------------------------------------------------- read, and not trained


@case
def logits_after_step(model, ids, mask, labels):
    """Logits are read after the optimizer's step."""
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    yield outputs.loss
    yield from (outputs.logits.mean().item(), outputs.logits[:, -1].std().item())


@case
def logits_as_numpy(model, ids, mask, labels):
    """Logits go to numpy, as metrics outside of torch take them."""
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    array = outputs.logits.detach().cpu().numpy()
    yield outputs.loss
    yield from (float(array.mean()), float(array.std()), float(array[0, -1, 3]))


@case
def metric_all_positions(model, ids, mask, labels):
    """A metric over all positions: how often the pad would be predicted, and how sure the model is on average."""
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    yield outputs.loss
    guesses = outputs.logits.detach().argmax(dim=-1)
    yield from ((guesses == 0).float().mean(), guesses.float().mean())
    yield outputs.logits.detach().softmax(-1).amax(-1).mean()


@case
def weights_changed_beside_optimizer(model, ids, mask, labels):
    """Weights are clipped by .data after each step, and the logits of the step are read after that."""
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    yield outputs.loss
    for weight in model.parameters():
        weight.data.clamp_(-0.4, 0.4)
    yield outputs.logits.std().item()


# ---------------------------------------------------------------------- gradients of outputs themselves


class Reverse(torch.autograd.Function):
    """Gradients change their sign."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        return -g


class CrossEntropy(torch.autograd.Function):
    """A loss that writes the gradient of its logits itself."""

    @staticmethod
    def forward(ctx, logits, targets):
        chances = logits.softmax(-1)
        ctx.save_for_backward(chances, targets)
        return -chances.gather(-1, targets[..., None]).log().mean()

    @staticmethod
    def backward(ctx, grad):
        chances, targets = ctx.saved_tensors
        slope = chances.scatter_add(-1, targets[..., None], -torch.ones_like(chances[..., :1]))
        return grad * slope / targets.numel(), None


@case
def gradient_reversal_on_logits(model, ids, mask, labels):
    """A gradient reversal layer on the logits, from the first step on."""
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    yield outputs.loss + 0.1 * Reverse.apply(outputs.logits)[mask.bool()].pow(2).mean()
    yield model.lm_head.weight.grad.norm()


@case
def own_function_on_logits(model, ids, mask, labels):
    """A custom autograd function computes the loss from logits and writes their gradient itself."""
    logits = model(input_ids=ids, attention_mask=mask).logits
    yield CrossEntropy.apply(logits[:, :-1], ids[:, 1:])


@case
def tensor_hook_on_logits(model, ids, mask, labels):
    """A hook on the logits clips their gradient, row and position by row and position, and logs it."""
    seen, logits = [], model(input_ids=ids, attention_mask=mask).logits

    def clip(grad):
        seen.append(grad.norm().item())
        return grad.clamp(-0.01, 0.01)

    logits.register_hook(clip)
    yield next_tokens(logits, ids)
    yield seen


@case
def tensor_hook_loss_inside(model, ids, mask, labels):
    """A hook on the logits of a model that computes its own loss: it sees no gradient but that of what is added."""
    seen, outputs = [], model(input_ids=ids, attention_mask=mask, labels=labels)
    outputs.logits.register_hook(lambda grad: seen.append(grad.norm().item()))
    yield outputs.loss + 0.1 * outputs.logits.tanh().mean()
    yield seen


# ---------------------------------------------------------------------- several backwards, several calls


@case
def backward_twice(model, ids, mask, labels):
    """backward(retain_graph=True), and then backward again through the same graph."""
    loss = with_size(model(input_ids=ids, attention_mask=mask, labels=labels))
    loss.backward(retain_graph=True)
    first = model.lm_head.weight.grad.norm().item()
    yield loss
    yield from (first, model.lm_head.weight.grad.norm().item())


@case
def model_loss_then_outside_loss(model, ids, mask, labels):
    """The model's own loss goes backward first, then one that was made from its logits."""
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    outputs.loss.backward(retain_graph=True)
    yield 0.1 * outputs.logits.logsumexp(-1).square().mean()
    yield outputs.loss.item()


@case
def two_losses_two_backwards(model, ids, mask, labels):
    """Two losses from one forward, each with a backward of its own."""
    logits = model(input_ids=ids, attention_mask=mask).logits
    one = next_tokens(logits, labels)
    two = 0.1 * logits.pow(2).mean()
    one.backward(retain_graph=True)
    yield two
    yield one.item()


@case
def rdrop(model, ids, mask, labels):
    """R-drop: two forwards of one batch (dropout is off, so that it can be compared), and their divergence."""
    one, two = (model(input_ids=ids, attention_mask=mask, labels=labels) for _ in range(2))
    first, second = F.log_softmax(one.logits, -1), F.log_softmax(two.logits.roll(1, 0), -1)
    apart = F.kl_div(first, second, reduction="batchmean", log_target=True)
    apart = apart + F.kl_div(second, first, reduction="batchmean", log_target=True)
    yield (one.loss + two.loss) / 2 + 0.01 * apart
    yield apart.item()


@case
def scheduled_sampling(model, ids, mask, labels):
    """Half of the inputs are replaced by what the model predicts, at all positions; the second call sees no mask."""
    with torch.no_grad():
        guesses = model(input_ids=ids, attention_mask=mask).logits.argmax(-1).roll(1, 1)
    mixed = torch.where(torch.arange(16) % 2 == 1, guesses, ids)
    yield model(input_ids=mixed, labels=labels).loss
    yield mixed


@case
def soft_embeddings_fed_back(model, ids, mask, labels):
    """The model's own predictions, as mixtures of embeddings, are its next inputs; gradients go through both calls."""
    logits = model(input_ids=ids, attention_mask=mask).logits
    soft = F.softmax(logits, dim=-1) @ model.get_input_embeddings().weight
    again = model(inputs_embeds=soft, attention_mask=mask).logits
    size = soft.pow(2).mean()
    yield F.cross_entropy(again.flatten(0, 1), labels.flatten()) + 10 * size
    yield size.item()


@case
def virtual_adversarial(model, ids, mask, labels):
    """Virtual adversarial training: the divergence between clean and disturbed logits, at all positions."""
    embedded = model.get_input_embeddings()(ids)
    outputs = model(inputs_embeds=embedded, attention_mask=mask, labels=labels)
    clean = outputs.logits.detach()
    noise = (torch.randn(4, 16, 32) * 0.05).requires_grad_()
    disturbed = model(inputs_embeds=embedded.detach() + noise, attention_mask=mask).logits
    apart = F.kl_div(disturbed.log_softmax(-1), clean.softmax(-1), reduction="batchmean")
    (slope,) = torch.autograd.grad(apart, noise)
    noise = (noise + slope / (slope.abs().max() + 1e-6)).detach()
    disturbed = model(inputs_embeds=embedded + noise, attention_mask=mask).logits
    apart = F.kl_div(disturbed.log_softmax(-1), clean.softmax(-1), reduction="batchmean")
    yield outputs.loss + 0.1 * apart
    yield apart.item()


random.seed(0)
torch.manual_seed(0)
history = train(llama(), chosen())
