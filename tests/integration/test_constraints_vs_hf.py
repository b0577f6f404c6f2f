"""Compares constrained greedy decoding of the whole stack with Hugging Face.

Every constraint is made from what the model says without it, so that each of them matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.models.model_pair import ModelPair, ObservedEngine, make_request

NUM_OUTPUT_TOKENS = 12
PROMPT_LEN = 9
VOCAB_SIZE = 160
# What is asked of ours, and of Hugging Face.
Question = tuple[dict[str, Any], dict[str, Any]]


def questions(prompt: list[int], free: list[int]) -> list[Question]:
    """`free`: what the model says after `prompt` of its own accord."""
    phrase, tail = (free[2], free[3]), (*prompt[-2:], free[0])
    words = ((free[1],), phrase, tail, (*prompt, *free, 5), (free[4], free[5], free[6]))
    bias = {free[0]: -math.inf, free[2]: -3.5, prompt[0]: 2.0}
    allowed = sorted({*prompt, *free[:3], 40, 41})
    stop = free[3]
    return [
        ({"bad_words_token_ids": words}, {"bad_words_ids": [list(w) for w in words]}),
        # A bad word that is an end token is none.
        (
            {"bad_words_token_ids": ((stop,), (free[0],)), "stop_token_ids": frozenset({stop})},
            {"bad_words_ids": [[stop], [free[0]]], "eos_token_id": [stop]},
        ),
        ({"logit_bias": bias}, {"sequence_bias": {(t,): float(b) for t, b in bias.items()}}),
        (
            {"allowed_token_ids": frozenset(allowed), "repetition_penalty": 1.3},
            {
                "suppress_tokens": [t for t in range(VOCAB_SIZE) if t not in allowed],
                "repetition_penalty": 1.3,
            },
        ),
        (
            {"stop_token_ids": frozenset({stop}), "min_tokens": 6, "bad_words_token_ids": (tail,)},
            {"eos_token_id": [stop], "min_new_tokens": 6, "bad_words_ids": [list(tail)]},
        ),
        (
            {"bad_words_token_ids": words, "logit_bias": bias, "repetition_penalty": 0.8},
            {
                "bad_words_ids": [list(w) for w in words],
                "sequence_bias": {(t,): float(b) for t, b in bias.items()},
                "repetition_penalty": 0.8,
            },
        ),
    ]


def generate(reference: Any, prompt: list[int], options: dict[str, Any]) -> list[int]:  # noqa: ANN401
    output = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NUM_OUTPUT_TOKENS,
        pad_token_id=0,
        **{"eos_token_id": None, **options},
    )
    token_ids: list[int] = output[0, len(prompt) :].tolist()
    return token_ids


@pytest.mark.parametrize(
    ("architecture", "preempt_at", "depth", "budget"),
    [("llama", (), 2, 64), ("llama", (3, 6, 10), 3, 7), ("qwen2", (4, 9), 1, 64)],
)
def test_tokens_equal_hugging_face_generate_when_tokens_are_constrained(
    architecture: str,
    preempt_at: tuple[int, ...],
    depth: int,
    budget: int,
    pair_of: Callable[[str], ModelPair],
) -> None:
    pair = pair_of(architecture)
    assert pair.served.vocab_size == VOCAB_SIZE
    (prompt,) = pair.prompts([PROMPT_LEN])
    free = pair.answer(prompt, NUM_OUTPUT_TOKENS)
    asked = questions(prompt, free)
    engine = ObservedEngine(
        pair,
        depth=depth,
        preempt_at=set(preempt_at),
        block_size=4,
        num_device_blocks=64,
        max_num_batched_tokens=budget,
    )
    engine.serve(
        *(
            make_request(index, prompt, max_tokens=NUM_OUTPUT_TOKENS, **ours)
            for index, (ours, _) in enumerate(asked)
        )
    )
    answers = [generate(pair.reference, prompt, theirs) for _, theirs in asked]
    assert list(engine.delivered.values()) == [[answer] for answer in answers]
    assert all(answer != free[: len(answer)] for answer in answers)
