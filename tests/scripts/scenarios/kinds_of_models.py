"""Models of transformers of another kind in each case, with the losses that go with them."""

import copy

import torch
import torch.nn.functional as F
from tiny import VOCAB, bart, batch, bert, case, chosen, counting_pads, gpt2, llama, t5, train
from torch import nn
from transformers import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    MixtralConfig,
    MixtralForCausalLM,
)


def numbers(number):
    """For steps that make their batches themselves."""
    return (number,)


def both_sides(number):
    """A batch, and another one of shorter rows: for an encoder and a decoder, or for queries and passages."""
    return (*batch(number), *batch(number + 50, length=10))


def trained(model, step, steps=4, lr=0.05, batches=batch):
    return train(model, step, torch.optim.SGD(model.parameters(), lr=lr), steps, batches)


@case
def gpt2_loss_outside():
    """GPT-2, whose positions are learned, with a loss outside that counts pads."""
    return trained(gpt2(), counting_pads)


@case
def masked_language_model():
    """BERT fills masked tokens; the loss stands outside and counts only these."""

    def step(model, ids, mask, labels):
        hidden = torch.rand(ids.shape) < 0.3
        hidden[:, 1] = True
        logits = model(input_ids=ids.masked_fill(hidden, 2), attention_mask=mask).logits
        yield F.cross_entropy(logits.transpose(1, 2), labels.masked_fill(~hidden, -100))

    return trained(bert(BertForMaskedLM), step)


@case
def attentions_used():
    """Attention weights are asked for, and their entropy is a part of the loss."""

    def step(model, ids, mask, labels):
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels, output_attentions=True)
        entropy = -sum((each * (each + 1e-9).log()).sum(-1).mean() for each in outputs.attentions)
        yield outputs.loss - 0.1 * entropy
        yield entropy.item()

    return trained(bert(BertForMaskedLM, attn_implementation="eager"), step)


@case
def sequence_classification():
    """BERT's classifier with its own loss, and an accuracy from its logits."""

    def step(model, ids, mask, _):
        labels = ids[:, 1] % 3
        outputs = model(input_ids=ids, attention_mask=mask, token_type_ids=torch.zeros_like(ids), labels=labels)
        yield outputs.loss
        yield (outputs.logits.argmax(-1) == labels).float().mean()

    return trained(bert(BertForSequenceClassification, num_labels=3), step)


@case
def token_classification():
    """Token classification with a loss outside that ignores pads; the predicted tags are counted at all positions."""

    def step(model, ids, mask, _):
        logits = model(input_ids=ids, attention_mask=mask).logits
        tags = (ids % 5).masked_fill(mask == 0, -100)
        yield F.cross_entropy(logits.view(-1, 5), tags.view(-1))
        yield logits.argmax(-1).flatten().bincount(minlength=5)

    return trained(bert(BertForTokenClassification, num_labels=5), step)


@case
def saliency_of_pads():
    """The gradient of a loss over all positions with respect to the embeddings of pads is recorded."""

    def step(model, ids, mask, _):
        embedded = model.get_input_embeddings()(ids)
        embedded.retain_grad()
        logits = model(inputs_embeds=embedded, attention_mask=mask).logits
        yield F.cross_entropy(logits.flatten(0, 1), ids.flatten() % 5)
        yield embedded.grad.norm(dim=-1)

    return trained(bert(BertForTokenClassification, num_labels=5), step)


@case
def holes_in_mask():
    """Single tokens inside of rows are masked as well."""

    def step(model, ids, mask, labels):
        mask[:, 1] = 0
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
        yield outputs.loss + outputs.logits.mean()

    return trained(bert(BertForMaskedLM), step)


@case
def whole_row_of_pads():
    """One row of a batch has no token at all, as a collator fills a batch up."""

    def step(model, ids, mask, labels):
        ids[3], mask[3], labels[3] = 0, 0, -100
        logits, labels = model(input_ids=ids, attention_mask=mask).logits, labels.flatten()
        yield F.cross_entropy(logits.flatten(0, 1), labels.remainder(5).where(labels >= 0, -100))

    return trained(bert(BertForTokenClassification, num_labels=5), step)


@case
def question_answering():
    """Spans: logits over positions, pads masked with a large number, outside of the model."""

    def step(model, ids, mask, _):
        outputs = model(input_ids=ids, attention_mask=mask)
        begins = outputs.start_logits.masked_fill(mask == 0, -1e4)
        ends = outputs.end_logits + (1 - mask) * -1e4
        yield F.cross_entropy(begins, torch.ones(4, dtype=torch.long)) + F.cross_entropy(ends, mask.sum(1) - 1)

    return trained(bert(BertForQuestionAnswering), step)


@case
def question_answering_inside():
    """Spans: the model's own loss, whose softmax runs over all positions, pads among them."""

    def step(model, ids, mask, _):
        ends = mask.sum(1) - 1
        outputs = model(input_ids=ids, attention_mask=mask, start_positions=ends // 2, end_positions=ends)
        yield outputs.loss
        yield outputs.start_logits.mean().item()

    return trained(bert(BertForQuestionAnswering), step)


@case
def multiple_choice():
    """Multiple choice: batches of three dimensions."""

    def step(model, number):
        ids, mask, _ = batch(number, rows=6)
        outputs = model(input_ids=ids.view(2, 3, 16), attention_mask=mask.view(2, 3, 16))
        yield F.cross_entropy(outputs.logits, torch.tensor([number % 3, 0]))

    return trained(bert(BertForMultipleChoice), step, batches=numbers)


@case(expect="packed")
def reward_model():
    """A reward model takes each row's last token by itself; chosen rows have to be above rejected ones."""

    def step(model, ids, mask, _):
        rewards = model(input_ids=ids, attention_mask=mask).logits.squeeze(-1)
        yield -F.logsigmoid(rewards[:2] - rewards[2:]).mean()
        yield rewards.tolist()

    return trained(llama(LlamaForSequenceClassification, num_labels=1), step)


@case
def process_rewards():
    """A reward at every position, by a token classifier of one label; the loss squares all of them."""

    def step(model, ids, mask, _):
        rewards = model(input_ids=ids, attention_mask=mask).logits.squeeze(-1)
        totals = rewards.cumsum(1)[:, -1]
        yield -F.logsigmoid(totals[:2] - totals[2:]).mean() + rewards.square().mean()
        yield totals.tolist()

    return trained(llama(LlamaForTokenClassification, num_labels=1, classifier_dropout=0.0), step)


@case
def router_losses():
    """A mixture of experts, whose auxiliary loss looks at the routing of tokens."""
    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64, initializer_range=0.15,
        output_router_logits=True, router_aux_loss_coef=0.1,
    )  # fmt: skip

    def step(model, ids, mask, labels):
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
        yield outputs.loss + 1e-2 * outputs.router_logits[-1].logsumexp(-1).pow(2).mean()
        yield outputs.aux_loss.item()

    return trained(MixtralForCausalLM(config).train(), step)


@case(default=True, expect="packed")
def mixture_of_experts():
    """Groups of experts, one of which all tokens share; the script balances the others by a bias, as DeepSeek does."""
    config = DeepseekV3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, initializer_range=0.15, moe_intermediate_size=16,
        n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10,
    )  # fmt: skip

    def step(model, ids, mask, labels):
        yield model(input_ids=ids, attention_mask=mask, labels=labels).loss
        bias = model.model.layers[1].mlp.gate.e_score_correction_bias
        bias.add_(torch.linspace(-1e-2, 1e-2, len(bias)))

    return trained(DeepseekV3ForCausalLM(config).train(), step)


# ---------------------------------------------------------------------- encoder and decoder


@case
def t5_loss_inside():
    """T5 with its own loss, decoder pads ignored, and its logits read at all positions after the second step."""

    def step(model, number):
        ids, mask, _, _, _, labels = both_sides(number)
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
        yield outputs.loss
        yield outputs.logits.std().item() if number > 1 else 0.0

    return trained(t5(), step, lr=0.01, batches=numbers)


@case
def t5_loss_outside():
    """T5 with a loss outside that counts the decoder's pads."""

    def step(model, ids, mask, _, into, into_mask, labels):
        started = F.pad(into, (1, 0))[:, :-1]
        logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=started).logits
        yield F.cross_entropy(logits.flatten(0, 1), into.flatten())

    return trained(t5(), step, steps=3, lr=0.01, batches=both_sides)


@case
def bart_loss_outside():
    """Bart with a mask for its decoder; the loss ignores pads, and the encoder's last states are regularised."""

    def step(model, ids, mask, _, into, into_mask, labels):
        outputs = model(input_ids=ids, attention_mask=mask, decoder_input_ids=into, decoder_attention_mask=into_mask)
        loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        yield loss + 0.1 * outputs.encoder_last_hidden_state.abs().mean()

    return trained(bart(), step, steps=3, batches=both_sides)


@case
def encoder_outputs_reused():
    """The encoder runs once, and its outputs go to the decoder twice."""

    def step(model, ids, mask, _, into, into_mask, labels):
        encoded = model.get_encoder()(input_ids=ids, attention_mask=mask)
        targets = (labels, labels.roll(1, 0))
        losses = [model(encoder_outputs=encoded, attention_mask=mask, labels=each).loss for each in targets]
        yield sum(losses) + 0.1 * encoded.last_hidden_state.pow(2).mean()

    return trained(t5(), step, steps=3, lr=0.01, batches=both_sides)


# ---------------------------------------------------------------------- several models


@case
def distill_all_positions():
    """Distillation over all positions, pads among them, from a frozen teacher that the student starts near."""
    student = llama()
    teacher = copy.deepcopy(student).eval().requires_grad_(False)

    def step(model, ids, mask, labels):
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
        with torch.no_grad():
            expected = teacher(input_ids=ids, attention_mask=mask).logits
        found, wanted = F.log_softmax(outputs.logits / 2, -1), F.log_softmax(expected / 2, -1)
        apart = F.kl_div(found, wanted, reduction="batchmean", log_target=True)
        yield outputs.loss + apart
        yield apart.item()

    return trained(student, step)


@case
def distill_tokens():
    """Distillation over the tokens only, from a frozen teacher."""
    teacher = llama().eval().requires_grad_(False)

    def step(model, ids, mask, labels):
        found = F.log_softmax(model(input_ids=ids, attention_mask=mask).logits, dim=-1)
        with torch.no_grad():
            expected = F.softmax(teacher(input_ids=ids, attention_mask=mask).logits, dim=-1)
        apart = F.kl_div(found, expected, reduction="none").sum(-1)
        yield (apart * mask).sum() / mask.sum()

    return trained(llama(), step)


@case
def mutual_learning():
    """Deep mutual learning: two models of different kinds, one loss for both."""

    def step(models, ids, mask, labels):
        first, second = (model(input_ids=ids, attention_mask=mask, labels=labels) for model in models)
        apart = F.mse_loss(first.logits.softmax(-1), second.logits.softmax(-1))
        yield first.loss + second.loss + 10 * apart
        yield apart.item()

    return trained(nn.ModuleList([llama(), gpt2()]), step)


@case
def generator_and_discriminator():
    """ELECTRA-like: a generator fills masked tokens, a discriminator says at every position which ones were filled."""
    generator, discriminator = bert(BertForMaskedLM), bert(BertForTokenClassification, num_labels=1)

    def step(models, ids, mask, labels):
        hidden = torch.zeros_like(ids, dtype=torch.bool)
        hidden[:, 1:16:4] = True
        hidden &= mask.bool()
        shown, asked = ids.masked_fill(hidden, 2), labels.masked_fill(~hidden, -100)
        outputs = generator(input_ids=shown, attention_mask=mask, labels=asked)
        filled = torch.where(hidden, outputs.logits.argmax(-1), ids)
        told = discriminator(input_ids=filled, attention_mask=mask).logits.squeeze(-1)
        yield outputs.loss + 5 * F.binary_cross_entropy_with_logits(told, (filled != ids).float())
        yield filled

    return trained(nn.ModuleList([generator, discriminator]), step, steps=3)


@case
def contrastive_two_calls():
    """SimCSE: the same batch goes through the encoder twice (with noise on the embeddings instead of dropout)."""

    def step(model, ids, mask, _):
        one = model(input_ids=ids, attention_mask=mask).last_hidden_state.mean(1)
        noisy = model.embeddings.word_embeddings(ids) + 0.01 * torch.randn(4, 16, 32)
        two = model(inputs_embeds=noisy, attention_mask=mask).last_hidden_state.mean(1)
        similar = F.cosine_similarity(one[:, None], two[None], dim=-1) / 0.5
        yield F.cross_entropy(similar, torch.arange(4))

    return trained(bert(), step)


@case
def late_interaction():
    """Each token of a query looks for its best match among all positions of the passages."""

    def step(model, ids, mask, _, others, others_mask, __):
        queries = F.normalize(model(input_ids=ids, attention_mask=mask)[0], dim=-1)
        passages = F.normalize(model(input_ids=others, attention_mask=others_mask)[0], dim=-1)
        best = torch.einsum("qih,pjh->qpij", queries, passages).max(-1).values
        yield F.cross_entropy((best * mask[:, None]).sum(-1), torch.arange(4))

    return trained(bert(), step, batches=both_sides)


@case
def value_head():
    """PPO-like: a value head on hidden states, its loss clipped and masked; the policy's loss over tokens."""
    model, head = llama(), nn.Linear(32, 1)

    def step(parts, ids, mask, _):
        outputs = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        values = head(outputs.hidden_states[-1]).squeeze(-1)
        logs = outputs.logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        returns = (mask.flip(1).cumsum(1).flip(1) / 16).float()
        advantages = (returns - values.detach())[:, 1:]
        advantages = (advantages - advantages.mean()) / advantages.std()
        policy_loss = -(logs * advantages * mask[:, 1:]).sum() / mask[:, 1:].sum()
        value_loss = ((values - returns).square() * mask).sum() / mask.sum()
        yield policy_loss + 0.5 * value_loss
        yield value_loss.item()

    return trained(nn.ModuleList([model, head]), step)


torch.manual_seed(0)
history = chosen()()
