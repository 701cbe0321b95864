"""One packed row by hand gives what the padded batch gives: else it would be no fair opponent."""

from __future__ import annotations

import pytest
import torch

from deepytorch.bench.gradients import max_relative_difference
from deepytorch.bench.hand_packed import ATTENTION_NAME, hand_packed_arm, pack, register_attention
from deepytorch.bench.models import build_model
from deepytorch.bench.training_step import Precision, compiled_arm, forward_backward
from deepytorch.data import IGNORE_INDEX

VOCAB_SIZE = 300
CPU = Precision(torch.device("cpu"))


@pytest.fixture
def batch():
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    ids = torch.randint(4, VOCAB_SIZE, mask.shape) * mask
    labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
    labels[:, 0] = IGNORE_INDEX  # a prompt
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def test_pack_shifts_labels_inside_their_row(batch):
    ids, packed = batch["input_ids"], pack(batch)
    assert packed["cu_seqlens"].tolist() == [0, 3, 8, 10]
    assert packed["cu_seqlens"].dtype == torch.int32
    assert packed["max_length"] == 5
    assert packed["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 0, 1]]
    assert packed["input_ids"].tolist() == [[*ids[0, :3].tolist(), *ids[1].tolist(), *ids[2, :2].tolist()]]
    wanted = [*ids[0, 1:3].tolist(), -100, *ids[1, 1:].tolist(), -100, ids[2, 1].item(), -100]
    assert packed["shift_labels"].tolist() == wanted


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_loss_and_gradients_are_those_of_the_padded_batch(name, batch):
    register_attention()
    padded = compiled_arm("eager", build_model(name, "tiny", vocab_size=VOCAB_SIZE), None)
    model = build_model(name, "tiny", vocab_size=VOCAB_SIZE, attn_implementation=ATTENTION_NAME)
    packed = hand_packed_arm("handpacked", model)
    losses = [forward_backward(arm, x, CPU).loss for arm, x in ((padded, batch), (packed, pack(batch)))]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert max_relative_difference(packed.model, padded.model) < 1e-5
