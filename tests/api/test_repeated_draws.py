"""When a call is to draw what an earlier one has drawn."""

from __future__ import annotations

import torch

from deepytorch.training_calls import RepeatedDraws, SeenStates
from tests.cold import run_cold


def test_a_state_is_set_back_where_it_was_seen_and_another_one_since() -> None:
    seen = SeenStates()
    assert seen.set_back_to(1, True) is None
    assert seen.set_back_to(1, True) is None  # nothing was drawn
    seen.ended(2)
    assert seen.set_back_to(2, False) is None  # the next call goes on from there
    seen.ended(3)
    assert seen.set_back_to(1, False) is True
    seen.ended(2)
    assert seen.set_back_to(1, True) is False  # the last call that began so had none


def drawing(draws: RepeatedDraws) -> bool:
    """One call of a module with dropout: whether it is to run in eager."""
    with draws:
        torch.rand(1)
        return draws.found


def test_calls_that_go_on_are_not_repeated_and_a_second_pass_is() -> None:
    torch.manual_seed(123_456)
    draws = RepeatedDraws(torch.device("cpu"))
    assert [drawing(draws) for _ in range(3)] == [False, False, False]
    state = torch.get_rng_state()
    assert not drawing(draws)
    torch.set_rng_state(state)
    assert drawing(draws)
    assert drawing(draws)  # for good: packed calls beside it would draw other numbers


def test_a_module_that_draws_nothing_is_left_alone() -> None:
    torch.manual_seed(654_321)
    draws, state = RepeatedDraws(torch.device("cpu")), torch.get_rng_state()
    for _ in range(3):
        with draws:
            assert not draws.found
        torch.rand(1)  # the script does
        torch.set_rng_state(state)


SEEDED = """
import sys
import deepytorch, torch
from transformers import LlamaConfig, LlamaForCausalLM
from deepytorch.compiler.report import LEDGER
deepytorch.configure(options={"lowering": "aot_eager", "wait": True})
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes, attention_dropout=0.1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
mask = (torch.arange(12) < torch.tensor([[12], [5], [7]])).long()
ids = torch.randint(1, 64, (3, 12)) * mask
for _ in range(5):
    model.train()
    model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(7)
        model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
[region] = [each for each in LEDGER.report().regions if each.name.startswith("region")]
sys.stdout.write(str(region.steps_packed))
"""


def test_an_evaluation_that_sets_the_seed_leaves_training_packed() -> None:
    assert int(run_cold(SEEDED).stdout) == 4  # all but the first, which is profiled
