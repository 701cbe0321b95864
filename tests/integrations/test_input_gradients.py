"""The hook that has embeddings' outputs require gradients leaves a model one graph, and is what it was in eager."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import deepytorch
from tests.compiler.parity import batches, causal_batch
from tests.compiler.test_parity_decoders import llama

pytest.importorskip("peft")


@pytest.fixture(autouse=True)
def _with_the_changes_of_an_import() -> Iterator[None]:
    deepytorch.enable()
    yield
    deepytorch.disable()


def batch() -> dict[str, torch.Tensor]:
    (found,) = batches(causal_batch, (3, 9, "right"))
    return found


def frozen() -> Any:
    """A Llama of which the last layer is trained, so that checkpoints need inputs that require gradients."""
    model = llama("sdpa").train().requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)
    return model


def hooks_of(model: Any) -> list[Any]:
    return list(model.get_input_embeddings()._forward_hooks.values())


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_model_with_checkpoints_is_one_graph_with_eagers_gradients(is_reentrant: bool) -> None:
    model = frozen()
    reference = copy.deepcopy(model)
    for each in (model, reference):
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": is_reentrant})
        each.enable_input_require_grads()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found, expected = (each(**batch(), use_cache=False) for each in (compiled, reference))
    found.loss.backward()
    expected.loss.backward()
    torch.testing.assert_close(found.loss, expected.loss)
    assert found.logits.requires_grad
    torch.testing.assert_close(gradients(model), gradients(reference))


def test_in_eager_the_output_of_the_embedding_requires_gradients_by_itself() -> None:
    model = frozen()
    model.enable_input_require_grads()
    embedded = model.get_input_embeddings()(batch()["input_ids"])
    assert embedded.requires_grad
    assert embedded.is_leaf  # as with transformers' own hook
    with torch.no_grad():
        assert model.get_input_embeddings()(batch()["input_ids"]).requires_grad


def test_a_hook_that_is_registered_again_stands_there_once_and_goes_when_it_is_disabled() -> None:
    model = frozen()
    for _ in range(3):
        model.enable_input_require_grads()
        assert len(hooks_of(model)) == 1
    model.disable_input_require_grads()  # of the last call only, as in eager
    assert len(hooks_of(model)) == 1
    other = frozen()
    other.enable_input_require_grads()
    other.disable_input_require_grads()
    assert not hooks_of(other)


def test_hooks_of_the_script_stay() -> None:
    def make_inputs_require_grads(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.requires_grad_(True)

    model = frozen()
    handles = [model.get_input_embeddings().register_forward_hook(make_inputs_require_grads) for _ in range(2)]
    model.enable_input_require_grads()
    assert hooks_of(model)[:2] == [make_inputs_require_grads] * 2
    assert len(hooks_of(model)) == 3
    for handle in handles:
        handle.remove()
    assert len(hooks_of(model)) == 1


def test_disabled_it_is_transformers_own() -> None:
    deepytorch.disable()
    model = frozen()
    model.enable_input_require_grads()
    assert hooks_of(model)[0].__module__.startswith("transformers.")
