"""Beam search, driven with a model's logprobs, equals that of Hugging Face."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from scheduler_service.scheduler.values.beam_search import BeamSearch, Hypothesis
from scheduler_service.scheduler.values.sampling_params import BeamParams, EarlyStopping
from tests.support.covering import covering
from tests.support.models.hugging_face import BeamQuestion, generate_beams, load_reference
from tests.support.models.tiny_models import make_tiny_model

if TYPE_CHECKING:
    from collections.abc import Sequence as Items

# A small vocabulary, so that stop tokens are often among the best.
VOCAB_SIZE = 14
NUM_MODELS = 4
# The relative one is for a negative length penalty, which multiplies: there they sum in float32.
SCORE_TOLERANCE = 1e-4
SCORE_RELATIVE_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Case:
    """One search, by one of the models."""

    question: BeamQuestion
    model: int


def _make_cases() -> list[Case]:
    chance = random.Random(0)
    options = {
        "width": range(1, 7),
        "penalty": (-1.0, 0.0, 0.5, 1.0, 2.0),
        "early_stopping": list(EarlyStopping),
        "num_stop_tokens": range(3),
    }
    # Every three of their values together.
    kinds: list[Any] = [tuple(kind.values()) for kind in covering(options, strength=3)]
    return [
        Case(
            BeamQuestion(
                params=BeamParams(width, penalty, early_stopping),
                n=chance.choice((width, width, 1)),
                max_tokens=chance.choice((3, 6, 9, 14)),
                min_tokens=chance.choice((0, 0, 2)),
                stop_token_ids=frozenset(chance.sample(range(VOCAB_SIZE), num_stop_tokens)),
                prompt=[chance.randrange(VOCAB_SIZE) for _ in range(4)],
            ),
            model=chance.randrange(NUM_MODELS),
        )
        for width, penalty, early_stopping, num_stop_tokens in kinds
    ]


def _describe(case: Case) -> str:
    asked, p = case.question, case.question.params
    return (
        f"width{p.width}-penalty{p.length_penalty:g}-{p.early_stopping.value}"
        f"-stop{len(asked.stop_token_ids)}-min{asked.min_tokens}-max{asked.max_tokens}-n{asked.n}"
    )


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 1}
    return [
        load_reference(make_tiny_model("llama", tmp_path_factory.mktemp("llama"), seed, sizes))
        for seed in range(NUM_MODELS)
    ]


@pytest.mark.parametrize("case", _make_cases(), ids=_describe)
def test_hypotheses_equal_those_of_hugging_face(case: Case, references: list[Any]) -> None:
    reference = references[case.model]

    hypotheses = _search(reference, case.question)

    expected_token_ids, expected_scores = generate_beams(reference, case.question)
    assert [list(h.token_ids) for h in hypotheses] == expected_token_ids
    assert [h.score for h in hypotheses] == pytest.approx(
        expected_scores, abs=SCORE_TOLERANCE, rel=SCORE_RELATIVE_TOLERANCE
    )


def _search(reference: Any, asked: BeamQuestion) -> list[Hypothesis]:  # noqa: ANN401
    search = BeamSearch(
        asked.params,
        n=asked.n,
        max_tokens=asked.max_tokens,
        min_tokens=asked.min_tokens,
        stop_token_ids=asked.stop_token_ids,
    )
    beams = [asked.prompt]
    while not search.is_finished:
        selection = search.advance(_compute_candidates(reference, beams, search.num_candidates))
        beams = [[*beams[parent], token_id] for parent, token_id in selection.beams]
    return search.hypotheses


@torch.inference_mode()
def _compute_candidates(
    reference: Any,  # noqa: ANN401
    beams: list[list[int]],
    num_candidates: int,
) -> Items[Items[tuple[int, float]]]:
    logits = reference(torch.tensor(beams), use_cache=False).logits[:, -1]
    best = logits.log_softmax(-1).topk(min(num_candidates, VOCAB_SIZE))
    return [
        list(zip(token_ids, logprobs, strict=True))
        for token_ids, logprobs in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
