"""Recipes of fine-tuning as they are usually written, on batches whose widths and sides of padding change."""

import torch
import torch.nn.functional as F
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from tiny import TIMES, VOCAB, batch, bert, case, chosen, llama
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

LORA = {"task_type": "CAUSAL_LM", "r": 4, "lora_dropout": 0.0, "init_lora_weights": False}
SIDES = ("right", "left", "mixed")


def batches(step):
    """Batches of 9 to 17 positions."""
    return batch(step, length=9 + 2 * (step % 5), side=SIDES[step % 3])


def loss_inside(model, step):
    ids, mask, labels = batches(step)
    labels[:, 1:][mask[:, :-1] == 0] = -100  # the last pad on the left predicts nothing
    return model(input_ids=ids, attention_mask=mask, labels=labels).loss


def checkpointed(model, is_reentrant=False):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": is_reentrant})
    model.enable_input_require_grads()
    return model


def run(model, loss_of=loss_inside, lr=0.1, steps=5):
    """Train what requires gradients; records losses and the norm of all gradients."""
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=lr)
    history = []
    for step in range(steps * TIMES):
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        gradients = [each.grad.norm() for each in model.parameters() if each.grad is not None]
        history.append([loss.item(), torch.stack(gradients).float().norm().item()])
        optimizer.step()
    return [*history, [each.detach().float().norm().item() for each in model.parameters()]]


class Int8Linear(nn.Linear):
    """A frozen linear layer whose weight is stored in 8 bits, a scale for each row."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, inputs):
        return F.linear(inputs, self.weight.to(inputs.dtype) * self.scale.to(inputs.dtype))


class MatMul8Bit(torch.autograd.Function):
    """A product with a weight that is stored in 8 bits, as bitsandbytes has it."""

    @staticmethod
    def forward(ctx, inputs, weight, scale):
        ctx.save_for_backward(weight, scale)
        return F.linear(inputs, weight.to(inputs.dtype) * scale.to(inputs.dtype))

    @staticmethod
    def backward(ctx, grad):
        weight, scale = ctx.saved_tensors
        return grad @ (weight.to(grad.dtype) * scale.to(grad.dtype)), None, None


class FunctionLinear(Int8Linear):
    def forward(self, inputs):
        return MatMul8Bit.apply(inputs, self.weight, self.scale)


def quantized(kind):
    model = llama()
    for layer in model.model.layers:
        for part, names in (
            (layer.self_attn, ("q_proj", "k_proj", "v_proj", "o_proj")),
            (layer.mlp, ("up_proj", "down_proj")),
        ):
            for name in names:
                setattr(part, name, kind(getattr(part, name)))
    return model


@case(default=True, expect="packed", precision="bfloat16")
def lora_on_bfloat16():
    """A frozen base in bf16 under adapters in fp32, with gradient checkpointing: what QLoRA is without its 4 bits."""
    return run(checkpointed(get_peft_model(llama().to(torch.bfloat16), LoraConfig(**LORA))), lr=0.02)


@case(expect="packed", precision="bfloat16")
def lora_all_bfloat16():
    """Adapters in bf16 too."""
    model = get_peft_model(llama().to(torch.bfloat16), LoraConfig(**LORA), autocast_adapter_dtype=False)
    return run(checkpointed(model, True), lr=0.02)


@case(expect="packed")
def lora_on_int8():
    """A base in 8 bits, of a linear layer of the script's own."""
    model = quantized(Int8Linear).requires_grad_(False)
    return run(checkpointed(get_peft_model(model, LoraConfig(**LORA))))


@case
def lora_on_int8_by_function():
    """The same by an autograd function."""
    model = quantized(FunctionLinear).requires_grad_(False)
    return run(checkpointed(get_peft_model(model, LoraConfig(**LORA))))


@case(expect="packed")
def prefix_tuning_by_peft():
    """Learned keys and values before each row."""
    return run(get_peft_model(llama(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)))


def moe(**changes):
    config = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.15,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**config, **changes})).train()


@case(expect="packed")
def lora_on_mixture_of_experts():
    """Adapters at the attention of a mixture of experts."""
    return run(get_peft_model(moe(), LoraConfig(**LORA, target_modules=["q_proj", "v_proj"])))


@case(expect="packed")
def lora_on_experts():
    """Adapters at the experts' own weights."""
    lora = LoraConfig(
        **LORA, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    )
    return run(get_peft_model(moe(), lora))


@case(expect="packed")
def router_loss():
    """A mixture of experts with its router's loss."""
    return run(moe(output_router_logits=True, router_aux_loss_coef=0.1))


class Tasks(nn.Module):
    """Heads on one encoder; outputs are named by the tasks that were asked for."""

    def __init__(self):
        super().__init__()
        self.encoder, self.tags, self.topic, self.words = (
            bert(),
            nn.Linear(32, 5),
            nn.Linear(32, 3),
            nn.Linear(32, VOCAB),
        )

    def forward(self, input_ids, attention_mask, tasks):
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        found = {}
        if "tags" in tasks:
            found["tags"] = self.tags(hidden)
        if "topic" in tasks:
            found["topic"] = self.topic(hidden[:, 0])
        if "words" in tasks:
            found["words"] = self.words(hidden)
        return found


@case
def tasks_that_vary():
    """A step asks for one head, or two."""

    def loss_of(model, step):
        ids, mask, labels = batches(step)
        tasks = (("tags",), ("topic", "tags"), ("words",), ("topic",))[step % 4]
        found = model(ids, mask, tasks)
        total = 0.0
        if "tags" in found:
            total = total + F.cross_entropy(
                found["tags"].flatten(0, 1), (ids % 5).masked_fill(mask == 0, -100).flatten()
            )
        if "topic" in found:
            total = total + F.cross_entropy(found["topic"], ids.amax(1) % 3)
        if "words" in found:
            total = total + F.cross_entropy(found["words"].flatten(0, 1), labels.flatten())
        return total

    return run(Tasks(), loss_of, steps=8)


class Experts(nn.Module):
    """Two of four experts a token, in a loop, as scripts have it."""

    def __init__(self, width=32):
        super().__init__()
        self.gate = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width)) for _ in range(4)
        )

    def forward(self, hidden):
        flat = hidden.reshape(-1, hidden.shape[-1])
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        output = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            output.index_add_(0, token, expert(flat[token]) * weights[token, place, None])
        return output.view_as(hidden)


class DenseExperts(Experts):
    """All experts for all tokens, with the gate's weights."""

    def forward(self, hidden):
        weights = self.gate(hidden).softmax(-1)
        return sum(expert(hidden) * weights[..., number, None] for number, expert in enumerate(self.experts))


class Swapped(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.model = llama()
        for layer in self.model.model.layers:
            layer.mlp = experts()

    def forward(self, **batch):
        return self.model(**batch)


@case
def experts_in_a_loop():
    """A Llama whose feed-forward layers a script replaced."""
    return run(Swapped(Experts))


@case(expect="packed")
def experts_all_at_once():
    """The same with all experts for all tokens."""
    return run(Swapped(DenseExperts))


@case(expect="packed")
def two_models_learn_from_each_other():
    """Mutual distillation: each is the other's teacher, and both are trained."""
    both = nn.ModuleList([llama(), llama(num_hidden_layers=1)])

    def loss_of(both, step):
        ids, mask, _ = batches(step)
        one, other = (each(input_ids=ids, attention_mask=mask).logits.log_softmax(-1) for each in both)
        real = mask.bool()
        apart = F.kl_div(one[real], other[real].detach(), log_target=True, reduction="batchmean")
        return apart + F.kl_div(other[real], one[real].detach(), log_target=True, reduction="batchmean")

    return run(both, loss_of)


torch.manual_seed(0)
history = chosen()()
