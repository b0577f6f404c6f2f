"""The truth: what Hugging Face `generate` says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from scheduler_service.scheduler.values.sampling_params import BeamParams, EarlyStopping

_EARLY_STOPPING: Mapping[EarlyStopping, bool | str] = MappingProxyType(
    {
        EarlyStopping.HEURISTIC: False,
        EarlyStopping.ALWAYS: True,
        EarlyStopping.NEVER: "never",
    }
)


def load_reference(directory: Path) -> Any:  # noqa: ANN401
    """The model as transformers runs it, in the checkpoint's data type."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory)


def generate_greedily(reference: Any, prompt: list[int], num_tokens: int) -> list[int]:  # noqa: ANN401
    """The `num_tokens` tokens after `prompt`; nothing ends it earlier."""
    output = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    token_ids: list[int] = output[0, len(prompt) :].tolist()
    assert len(token_ids) == num_tokens
    return token_ids


@dataclass(frozen=True, slots=True)
class BeamQuestion:
    """One beam search."""

    prompt: list[int]
    params: BeamParams
    n: int
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()


def generate_beams(reference: Any, question: BeamQuestion) -> tuple[list[list[int]], list[float]]:  # noqa: ANN401
    """The outputs, best first, stop tokens included, and their scores."""
    prompt = question.prompt
    output = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=question.params.width,
        num_return_sequences=question.n,
        length_penalty=question.params.length_penalty,
        early_stopping=_EARLY_STOPPING[question.params.early_stopping],
        do_sample=False,
        max_new_tokens=question.max_tokens,
        min_new_tokens=question.min_tokens,
        eos_token_id=sorted(question.stop_token_ids) or None,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
        # By itself it takes a beam search of width 1 for greedy search.
        custom_generate=type(reference)._beam_search,
    )
    # The padding after a sequence looks like a token; only the beam indices tell them apart.
    lengths = (output.beam_indices >= 0).sum(1).tolist()
    token_ids = [
        row[len(prompt) : len(prompt) + length].tolist()
        for row, length in zip(output.sequences, lengths, strict=True)
    ]
    return token_ids, output.sequences_scores.tolist()
