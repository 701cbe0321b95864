"""Models are made or called in another way in each case: hooked, normalised, checkpointed, compiled, cast, wrapped."""

import warnings

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from tiny import bert, case, chosen, counting_pads, llama, loss_and_size, next_tokens, train, with_size
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM


def trained(model, step, lr=0.1):
    return train(model, step, torch.optim.SGD(model.parameters(), lr=lr), steps=3)


# ---------------------------------------------------------------------- weights


@case
def spectral_norm():
    """Spectral normalisation, whose power iteration moves buffers in every training call."""
    model = llama()
    parametrizations.spectral_norm(model.lm_head)
    parametrizations.spectral_norm(model.model.layers[1].mlp.down_proj)
    return [*trained(model, loss_and_size), list(model.buffers())]


@case
def spectral_norm_old():
    """The older spectral normalisation, made of a forward pre-hook."""
    model, head = bert(), nn.utils.spectral_norm(nn.Linear(32, 2))
    nn.utils.spectral_norm(model.encoder.layer[0].output.dense)

    def step(parts, ids, mask, labels):
        pooled = model(input_ids=ids, attention_mask=mask).last_hidden_state.mean(1)
        yield F.cross_entropy(head(pooled), ids[:, 1] % 2)

    return trained(nn.ModuleList([model, head]), step, lr=0.05)


@case
def weight_norm():
    """Weight normalisation on the head and on a projection."""
    model = llama()
    parametrizations.weight_norm(model.model.layers[1].mlp.down_proj)
    parametrizations.weight_norm(model.lm_head)
    return trained(model, loss_and_size)


@case
def parametrized_weights():
    """A parametrization keeps a weight symmetric."""

    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight.triu() + weight.triu(1).transpose(-1, -2)

    model = llama()
    parametrize.register_parametrization(model.model.layers[0].self_attn.o_proj, "weight", Symmetric())
    return trained(model, counting_pads)


@case
def prompt_tuning():
    """Learned vectors stand before each row's embeddings, and the mask is made longer."""
    model, prompt = llama().requires_grad_(False), nn.Parameter(torch.randn(3, 32))

    def step(prompts, ids, mask, labels):
        embedded = torch.cat([prompt.expand(4, -1, -1), model.get_input_embeddings()(ids)], dim=1)
        mask = torch.cat([torch.ones(4, 3, dtype=torch.long), mask], dim=1)
        logits = model(inputs_embeds=embedded, attention_mask=mask).logits[:, 2:-1]
        yield F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return trained(nn.ParameterList([prompt]), step, lr=1.0)


@case
def lora_switched_off():
    """DPO on LoRA: the reference is the same model with its adapters switched off."""
    config = LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "up_proj"], init_lora_weights=False)

    def step(model, ids, mask, labels):
        with torch.no_grad(), model.disable_adapter():
            before = model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)
        now = model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)
        gained = ((now - before).gather(-1, ids.roll(-1, 1)[..., None]).squeeze(-1) * mask).sum(-1)
        yield -F.logsigmoid(gained[:2] - gained[2:]).mean()
        yield gained.tolist()

    return trained(get_peft_model(llama(), config), step)


@case
def double_precision():
    """Everything is computed in double precision."""
    return trained(llama().double(), loss_and_size)


@case(precision="bfloat16")
def model_in_bf16():
    """Weights and activations are bfloat16 throughout."""

    def step(model, ids, mask, labels):
        yield next_tokens(model(input_ids=ids, attention_mask=mask).logits.float(), ids)

    return trained(llama().to(torch.bfloat16), step)


@case(precision="bfloat16")
def autocast_bf16():
    """Autocast to bfloat16, the loss outside in single precision."""

    def step(model, ids, mask, labels):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=ids, attention_mask=mask).logits
        yield next_tokens(logits.float(), labels) + 0.1 * logits.float().pow(2).mean()

    return trained(llama(), step)


# ---------------------------------------------------------------------- hooks


@case
def forward_hook_changes_output():
    """A hook steers the model: it adds a learned vector to the first layer's output; another one changes inputs."""
    model, steering = llama(), nn.Parameter(torch.randn(32))
    model.steering = steering
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output + 0.1 * steering)
    model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "input_ids": kwargs["input_ids"].clamp(max=90)}),
        with_kwargs=True,
    )
    return trained(model, loss_and_size)


@case
def forward_hook_on_the_model():
    """A hook on the whole model keeps its outputs; the loss is made from what it kept."""
    model, kept = llama(), {}
    model.register_forward_hook(lambda module, args, output: kept.update(logits=output.logits))

    def step(model, ids, mask, labels):
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        yield loss + 0.1 * kept["logits"].pow(2).mean()

    return trained(model, step)


@case
def forward_hooks_keep_activations():
    """Forward hooks keep each layer's output; their size is added to the loss."""
    model, kept = llama(), []
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, output: kept.append(output))

    def step(model, ids, mask, labels):
        kept.clear()
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        yield loss + 0.1 * sum(each.pow(2).mean() for each in kept)
        yield len(kept)

    return trained(model, step)


@case
def forward_hooks_log():
    """Forward hooks log the mean size of activations, and change nothing."""
    model, sizes = llama(), []
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda module, args, output: sizes.append(
                (output[0] if isinstance(output, tuple) else output).abs().mean().item()
            )
        )

    def step(model, ids, mask, labels):
        yield model(input_ids=ids, attention_mask=mask, labels=labels).loss

    return [*trained(model, step), sizes]


@case
def backward_hooks():
    """Full backward hooks log gradients of activations, and scale those of one layer."""
    model, sizes = llama(), []
    for layer in model.model.layers:
        layer.mlp.register_full_backward_hook(lambda module, grads, outer: sizes.append(outer[0].norm().item()))
    model.model.layers[1].mlp.register_full_backward_pre_hook(lambda module, outer: (outer[0] * 0.5,))
    return [*trained(model, counting_pads), sizes]


@case
def parameter_hooks():
    """Hooks on parameters scale and log gradients."""
    model, sizes = llama(), []
    model.lm_head.weight.register_hook(lambda grad: grad * 0.5)
    model.model.norm.weight.register_post_accumulate_grad_hook(lambda weight: sizes.append(weight.grad.norm().item()))
    return [*trained(model, loss_and_size), sizes]


@case
def weights_moved_by_hooks():
    """Hooks put a layer's weights in place before its forward and take them away after it, as offloading does."""
    model, elsewhere = llama(), {}

    def fetch(module, args):
        for name, weight in module.named_parameters():
            if name in elsewhere:
                weight.data = elsewhere.pop(name)

    def put_away(module, args, output):
        for name, weight in module.named_parameters():
            elsewhere[name] = weight.data.clone()

    def step(model, ids, mask, labels):
        yield with_size(model(input_ids=ids, attention_mask=mask, labels=labels))
        elsewhere.clear()

    model.lm_head.register_forward_pre_hook(fetch)
    model.lm_head.register_forward_hook(put_away)
    return trained(model, step)


@case
def saved_tensors_offloaded():
    """What backward needs is kept elsewhere, by saved-tensor hooks."""

    def step(model, ids, mask, labels):
        with torch.autograd.graph.save_on_cpu():
            loss = next_tokens(model(input_ids=ids, attention_mask=mask).logits, ids)
        yield loss

    return trained(llama(), step)


# ---------------------------------------------------------------------- ways to call


@case
def data_parallel():
    """nn.DataParallel, which on a CPU calls the model itself."""
    return trained(nn.DataParallel(llama()), loss_and_size)


@case
def training_in_eval_mode():
    """The model stays in evaluation mode, and is trained all the same."""
    return trained(llama().eval(), counting_pads)


@case
def model_forward_called():
    """The script calls model.forward, not the model."""

    def step(model, ids, mask, labels):
        yield next_tokens(model.forward(input_ids=ids, attention_mask=mask).logits, ids)

    return trained(llama(), step)


@case
def overrides_call():
    """A model class that overrides __call__, to divide logits by a temperature."""

    class Tempered(LlamaForCausalLM):
        def __call__(self, *args, **kwargs):
            outputs = super().__call__(*args, **kwargs)
            outputs.logits = outputs.logits / 0.8
            return outputs

    return trained(llama(Tempered), counting_pads)


@case
def body_and_head_called():
    """The script calls the model's body and its head itself, on all positions."""

    def step(model, ids, mask, labels):
        hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state
        yield next_tokens(model.lm_head(F.normalize(hidden, dim=-1) * 4), ids)

    return trained(llama(), step)


@case
def functional_call_training():
    """Every step goes through torch.func.functional_call with the model's own parameters."""

    def step(model, ids, mask, labels):
        weights = {name: weight * 1.0 for name, weight in model.named_parameters()}
        yield with_size(functional_call(model, weights, (ids,), {"attention_mask": mask, "labels": labels}))

    return trained(llama(), step)


@case
def tensors_of_own_class():
    """Batches are of a class of the script's own, derived from torch.Tensor; the loss counts pads."""

    class Named(torch.Tensor):
        pass

    def step(model, ids, mask, labels):
        logits = model(input_ids=ids.as_subclass(Named), attention_mask=mask.as_subclass(Named)).logits
        yield next_tokens(logits, ids)

    return trained(llama(), step)


@case
def model_compiled_by_user():
    """The script compiles the whole model by itself, with another backend."""
    model = llama()
    compiled = torch.compile(model, backend="eager")
    return trained(model, lambda model, *given: counting_pads(compiled, *given))


@case
def part_compiled_by_user():
    """The script compiles a part of the model by itself."""
    model = llama()
    model.model.layers[0].mlp = torch.compile(model.model.layers[0].mlp, backend="aot_eager")
    return trained(model, counting_pads)


@case
def step_compiled_by_user():
    """The script compiles its own function of forward and loss."""
    model, head = bert(), nn.Linear(32, 2)

    @torch.compile(backend="aot_eager")
    def loss_of(ids, mask):
        return F.cross_entropy(head(model(ids, mask).last_hidden_state.mean(1)), ids[:, 1] % 2)

    def step(parts, ids, mask, labels):
        yield loss_of(ids, mask)

    return trained(nn.ModuleList([model, head]), step, lr=0.05)


@case
def gradient_checkpointing_enabled():
    """The model's own gradient checkpointing, with a loss outside that counts pads."""
    model = llama(use_cache=False)
    model.gradient_checkpointing_enable()
    return trained(model, counting_pads)


@case
def checkpoint_around_model():
    """torch.utils.checkpoint around the whole model, without reentrance."""

    def step(model, ids, mask, labels):
        yield next_tokens(checkpoint(lambda a, b: model(a, b).logits, ids, mask, use_reentrant=False), ids)

    return trained(llama(), step)


@case
def checkpoint_around_model_reentrant():
    """torch.utils.checkpoint around the whole model, reentrant: the first forward runs without gradients."""

    def step(model, ids, mask, labels):
        embedded = model.get_input_embeddings()(ids)
        called = lambda a, b: model(inputs_embeds=a, attention_mask=b).logits  # noqa: E731
        yield next_tokens(checkpoint(called, embedded, mask, use_reentrant=True), ids)

    return trained(llama(), step)


@case
def anomaly_detection():
    """Training under torch.autograd.detect_anomaly, with a loss outside that counts pads."""
    warnings.simplefilter("ignore")
    with torch.autograd.detect_anomaly():
        return trained(llama(), counting_pads)


torch.manual_seed(0)
history = chosen()()
