"""Operator of flash-attn 3, from any build: called by the argument names of its schema.

Arguments differ between builds (vLLM's build has sinks and parallel contexts, and no defaults) and
between versions. So this module checks the schema, not a version: the schema must contain all
arguments we pass, and any other required argument must have a neutral value.
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
# Neutral values of arguments that have no default in some builds.
_NEUTRAL: dict[str, bool | int] = {
    "is_rotary_interleaved": True,
    "attention_chunk": 0,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
    "max_seqlen_k_new": 0,
}


class FlashAttention3Unusable(ValueError):
    """Reports that the operator is missing or cannot be called; the message says why."""


class FlashAttention3Op:
    """Operators of flash-attn 3 in one namespace of `torch.ops`."""

    def __init__(self, namespace: Any) -> None:  # noqa: ANN401
        """Checks the operators.

        Raises FlashAttention3Unusable if one is missing or incompatible.
        """
        self._forward = _operator(namespace, _FORWARD)
        self._forward_rest = _rest(self._forward, _FORWARD_ARGUMENTS)
        self._metadata = _operator(namespace, _METADATA)
        self._metadata_rest = _rest(self._metadata, _METADATA_ARGUMENTS)

    def forward(self, **arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        """Computes attention. Returns [T, H, E], and the log of each softmax's sum, [H, T].

        Takes all of _FORWARD_ARGUMENTS. The output is bfloat16 if queries are float8.
        """
        output, log_sums, *_ = self._forward(**self._forward_rest, **arguments)
        return output, log_sums

    def scheduler_metadata(self, **arguments: Any) -> Tensor:  # noqa: ANN401
        """Computes the scheduler metadata that `forward` would otherwise compute itself.

        Takes all of _METADATA_ARGUMENTS. The result is valid for all calls of `forward` with the
        same values of these arguments.
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
    """Returns neutral values of required arguments beyond `passed`.

    Raises FlashAttention3Unusable.
    """
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
