"""Megatron-LM: its fused functions are compiled by deepytorch, its GPT and BERT are packed at their entry.

Megatron-LM decorates these functions with `megatron.core.jit.jit_fuser`, which is `torch.compile` under another name.
Our function replaces `jit_fuser` before other modules of Megatron-LM import it; `disable_jit_fuser` and
`enable_jit_fuser` work as before. Megatron-LM's models are not compiled: Dynamo would cut them into dozens of graphs at
their tensor and pipeline parallel layers. Their forward is replaced, which packs training calls (`megatron_entry`).
"""

from __future__ import annotations

from typing import Any

from deepytorch.patches import replace
from deepytorch.switch import SWITCH


def attach(jit: Any) -> None:
    """Take over `jit_fuser` if it is `torch.compile`. `jit`: megatron.core.jit."""
    from deepytorch import autowrap

    autowrap.LEFT_ALONE["megatron"] = "models of Megatron-LM are not compiled; its fused functions are."
    enable = getattr(jit, "enable_jit_fuser", None)
    if not _is_compile(getattr(jit, "jit_fuser", None)):
        return
    replace(jit, "jit_fuser", lambda _: compile_fused, "compile Megatron-LM's fused functions")
    if enable is None:
        return

    def enabling(original: Any) -> Any:
        def enable_jit_fuser() -> None:
            original()
            if _is_compile(jit.jit_fuser):
                jit.jit_fuser = compile_fused

        return enable_jit_fuser

    replace(jit, "enable_jit_fuser", enabling, "keep compiling them when Megatron-LM switches its fuser on again")


def attach_gpt(gpt_model: Any) -> None:
    """Pack batches at the entry of `GPTModel`. gpt_model: megatron.core.models.gpt.gpt_model."""
    replace(gpt_model.GPTModel, "forward", _packing, "pack padded batches of Megatron-LM's GPT")


def attach_bert(bert_model: Any) -> None:
    """Pack batches at the entry of `BertModel`. bert_model: megatron.core.models.bert.bert_model."""
    replace(bert_model.BertModel, "forward", _packing, "pack padded batches of Megatron-LM's BERT")


def attach_schedules(schedules: Any) -> None:
    """Let stages of a pipeline agree on packing. schedules: megatron.core.pipeline_parallel.schedules."""
    from deepytorch.integrations.megatron_pipeline import agreeing

    replace(schedules, "forward_backward_pipelining_without_interleaving", agreeing, "let stages of a pipeline agree")


def attach_attention(module: Any) -> None:
    """Let attention know packed rows. module: megatron.core.transformer.dot_product_attention."""

    def knowing_packed_rows(original: Any) -> Any:
        def forward(self: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
            from deepytorch.integrations.packed_attention import is_packed

            if not is_packed(attention_mask):
                return original(self, query, key, value, attention_mask, *args, **kwargs)
            from deepytorch.integrations.megatron_entry import attend_packed

            return attend_packed(self, query, key, value, attention_mask)

        return forward

    # Always, since a packed step may have its backward, which runs checkpointed layers again, after `disable()`.
    replace(module.DotProductAttention, "forward", knowing_packed_rows, "attend in packed rows", always=True)


def attach_casts(module: Any) -> None:
    """Have `Float16Module` ask outputs for their dtype, not for `.data`. module: megatron.core.transformer.module."""

    def asking_for_dtypes(original: Any) -> Any:
        def float16_to_fp32(val: Any) -> Any:
            import torch

            from deepytorch.compiler.step.outputs.pending import PendingTensor

            if isinstance(val, tuple | list):
                made = [float16_to_fp32(each) for each in val]
                return tuple(made) if isinstance(val, tuple) else made
            if not isinstance(val, PendingTensor):
                return original(val)
            return val.float() if val.dtype in (torch.float16, torch.bfloat16) else val

        return float16_to_fp32

    replace(module, "float16_to_fp32", asking_for_dtypes, "cast outputs of packed steps", always=True)


_ENTRY = "_deepytorch_entry"  # of a model's `MegatronEntry`, which so lives as long as the model


def _packing(original: Any) -> Any:
    """Return a model's forward whose training calls are packed."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not SWITCH.enabled:
            return original(self, *args, **kwargs)
        from deepytorch.autowrap import least_padding
        from deepytorch.training_calls import trains

        least = least_padding() if trains(self) else None
        if least is None:
            return original(self, *args, **kwargs)
        entry = vars(self).get(_ENTRY)
        if entry is None:
            from deepytorch.integrations.megatron_entry import MegatronEntry

            entry = vars(self)[_ENTRY] = MegatronEntry(self, original)
        return entry.call(args, kwargs, least)

    return forward


def compile_fused(function: Any = None, **kwargs: Any) -> Any:
    """Apply `torch.compile(function, backend="deepytorch")`, as a decorator with or without arguments."""
    import torch

    return torch.compile(function, **{"backend": "deepytorch", **kwargs})


def _is_compile(function: Any) -> bool:
    import torch

    return function is torch.compile
