"""The operator of flash-attn 3, whoever built it: called by the names that its schema has.

Builds differ in their arguments (what vLLM builds has sinks and parallel contexts, and no
defaults), and so do versions. So the schema of what is here is asked, not a version: what we pass
must be in it, and what it wants beside that must be something that can be left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_FORWARD, _METADATA = "fwd", "get_scheduler_metadata"
_FORWARD_ARGUMENTS = frozenset(
    {
        "q",
        "k",
        "v",
        "cu_seqlens_q",
        "seqused_k",
        "max_seqlen_q",
        "max_seqlen_k",
        "page_table",
        "q_descale",
        "k_descale",
        "v_descale",
        "softmax_scale",
        "is_causal",
        "window_size_left",
        "window_size_right",
        "softcap",
        "scheduler_metadata",
        "num_splits",
    }
)
_METADATA_ARGUMENTS = frozenset(
    {
        "batch_size",
        "max_seqlen_q",
        "max_seqlen_k",
        "num_heads",
        "num_heads_k",
        "headdim",
        "headdim_v",
        "qkv_dtype",
        "seqused_k",
        "cu_seqlens_q",
        "page_size",
        "is_causal",
        "window_size_left",
        "window_size_right",
        "has_softcap",
        "num_splits",
    }
)
# What stands for "not asked for", of arguments that have no default in some builds.
_NEUTRAL: dict[str, bool | int] = {
    "is_rotary_interleaved": True,
    "attention_chunk": 0,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
    "max_seqlen_k_new": 0,
}


class FlashAttention3Unusable(ValueError):
    """An operator that we cannot call, or none; the message says what is wrong with it."""


class FlashAttention3Op:
    """The operators of one namespace of `torch.ops`."""

    def __init__(self, namespace: Any) -> None:  # noqa: ANN401
        """Raises FlashAttention3Unusable if they are missing, or are to be called otherwise."""
        self._forward = _operator(namespace, _FORWARD)
        self._forward_rest = _rest(self._forward, _FORWARD_ARGUMENTS)
        self._metadata = _operator(namespace, _METADATA)
        self._metadata_rest = _rest(self._metadata, _METADATA_ARGUMENTS)

    def forward(self, **arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        """All of _FORWARD_ARGUMENTS. Returns [T, H, E], and the log of each softmax's sum [H, T].

        The output is bfloat16 where queries are float8.
        """
        output, log_sums, *_ = self._forward(**self._forward_rest, **arguments)
        return output, log_sums

    def scheduler_metadata(self, **arguments: Any) -> Tensor:  # noqa: ANN401
        """All of _METADATA_ARGUMENTS. What `forward` would find out about the rows by itself.

        It is good for all calls whose arguments of the same names are the same.
        """
        metadata: Tensor = self._metadata(**self._metadata_rest, **arguments)
        return metadata


def _operator(namespace: Any, name: str) -> Any:  # noqa: ANN401
    try:
        return getattr(namespace, name).default
    except AttributeError as error:
        named = getattr(namespace, "name", namespace)
        raise FlashAttention3Unusable(f"there is no operator {named}.{name}") from error


def _rest(operator: Any, passed: frozenset[str]) -> dict[str, bool | int | None]:  # noqa: ANN401
    """What is to be given beside `passed`. Raises FlashAttention3Unusable."""
    schema: torch.FunctionSchema = operator._schema
    missing = sorted(passed - {argument.name for argument in schema.arguments})
    if missing:
        raise FlashAttention3Unusable(f"{schema.name} has no argument {missing[0]}")
    rest: dict[str, bool | int | None] = {}
    for argument in schema.arguments:
        if argument.name in passed or argument.has_default_value():
            continue
        if isinstance(argument.type, torch.OptionalType):
            rest[argument.name] = None
        elif argument.name in _NEUTRAL:
            rest[argument.name] = _NEUTRAL[argument.name]
        else:
            raise FlashAttention3Unusable(f"{schema.name} wants an argument {argument.name}")
    return rest
