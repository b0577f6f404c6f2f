"""The truth: what Hugging Face `generate` says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


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
