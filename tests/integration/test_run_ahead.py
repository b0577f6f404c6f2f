"""Several tokens of a row in one step: the same tokens, with the same scores, in fewer steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from executor_service.backends import AUTO, Compute, choose_compute
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.runner import CacheConfig, build_runner
from executor_service.speculation import LoadedProposer, SpeculatingRunner, load_draft
from executor_service.steps import Runner
from scheduler_service.scheduler.values import (
    Feature,
    Request,
    SamplingParams,
    SchedulerConfig,
    ScoredToken,
    Speculation,
    StepEvents,
)
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.in_process import InProcessEngine, output_token_ids
from tests.support.models.tiny_models import VOCAB_SIZE, make_tiny_model

pytestmark = pytest.mark.cases(16)

NUM_OUTPUT_TOKENS = 24
BLOCK_SIZE = 8
FEATURES = frozenset(Feature) - {Feature.ADAPTERS, Feature.CROSS_ATTENTION, Feature.GRAMMAR}
CONFIG = SchedulerConfig(
    block_size=BLOCK_SIZE,
    num_device_blocks=60,
    num_host_blocks=20,
    max_num_seqs=6,
    max_num_batched_tokens=64,
    max_model_len=64,
    max_num_waiting=20,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=frozenset({3}),
    features=FEATURES,
    max_run_ahead_ms=10_000,
)
PROMPTS = [
    [random.Random(length).randrange(4, VOCAB_SIZE) for _ in range(length)]
    for length in (5, 33, 12, 1)
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
RANDOM = replace(GREEDY, temperature=0.9)
KINDS = {
    "greedy": GREEDY,
    "random": RANDOM,
    "cut": replace(RANDOM, top_k=40, top_p=0.9, min_p=0.01),
    "penalties": replace(RANDOM, repetition_penalty=1.3, frequency_penalty=0.4),
    "scores": replace(RANDOM, num_logprobs=2),
    "several": replace(RANDOM, n=2, num_logprobs=0),
    "ends": replace(
        RANDOM, ignore_eos=False, stop_token_ids=frozenset(range(4, VOCAB_SIZE, 9)), min_tokens=5
    ),
    "words": replace(
        RANDOM, bad_words_token_ids=((5,), *((a, b) for a in range(4, 20) for b in range(4, 60)))
    ),
}


# Without any, with runs, with guesses, with both.
ALONE: dict[str, Any] = {}
WAYS: dict[str, dict[str, Any]] = {
    "runs": {"max_run_ahead": 7},
    "drafts": {"speculation": Speculation.PROMPT_LOOKUP, "max_draft_tokens": 5},
    "both": {"max_run_ahead": 4, "speculation": Speculation.PROMPT_LOOKUP},
}


def _same_time(result: pb.StepResult) -> None:
    """Whatever steps take here, all take the same: so what is planned is always the same, too."""
    result.timings.forward_us, result.timings.sample_us = 1000, 0


class _Engine(InProcessEngine):
    """Counts steps, and keeps scores."""

    def __init__(
        self,
        compute: Compute,
        way: dict[str, Any],
        depth: int,
        preempt_at: frozenset[int],
        draft: LoadedProposer | None = None,
    ) -> None:
        config = replace(CONFIG, **way)
        pools = CacheConfig(BLOCK_SIZE, config.num_device_blocks, config.num_host_blocks)
        if draft is not None:
            pools = replace(pools, more_layers=draft.layers)
        alone = build_runner(compute.loaded, pools, compute.make_model, compute.draw)
        runner: Runner = alone
        if draft is not None:
            most_tokens = config.max_num_batched_tokens
            proposer = draft.proposer(alone, compute.loaded, most_tokens)
            runner = SpeculatingRunner(alone, proposer)
        super().__init__(config, runner, epoch=1, depth=depth, preempt_at=preempt_at)
        self.scores: dict[tuple[str, int], list[ScoredToken]] = {}

    @property
    def num_steps(self) -> int:
        return self.scheduler.num_steps

    def answer(self, alter: Callable[[pb.StepResult], None] | None = _same_time) -> StepEvents:
        return super().answer(alter)

    def _deliver(self, events: StepEvents) -> StepEvents:
        for event in events.tokens:
            if event.scored is not None:
                key = (event.sequence.request.request_id, event.sequence.index)
                self.scores.setdefault(key, []).append(event.scored)
        return super()._deliver(events)


@pytest.fixture(scope="module")
def compute(tmp_path_factory: pytest.TempPathFactory) -> Compute:
    directory = make_tiny_model("llama", tmp_path_factory.mktemp("llama"), seed=6)
    return choose_compute(
        lambda: load_model(ModelConfig(str(directory), max_model_len=64)),
        AUTO,
        BLOCK_SIZE,
        is_deterministic=False,
        is_int8=False,
    )


@pytest.fixture(scope="module", params=[6, 7], ids=["right", "wrong"])
def draft(
    compute: Compute, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> LoadedProposer:
    directory = make_tiny_model("llama", tmp_path_factory.mktemp("draft"), seed=request.param)
    return load_draft(str(directory), compute, AUTO, BLOCK_SIZE)


def _serve(
    compute: Compute,
    params: SamplingParams,
    way: dict[str, Any],
    depth: int,
    preempt_at: frozenset[int],
    draft: LoadedProposer | None = None,
) -> tuple[list[list[list[int]]], _Engine]:
    """The outputs of all sequences."""
    engine = _Engine(compute, way, depth, preempt_at, draft)
    requests = [
        Request.create(str(number), prompt, params, arrival=number, seed=number)
        for number, prompt in enumerate(PROMPTS)
    ]
    for request in requests:
        engine.add(request)
    engine.run()
    outputs = [[output_token_ids(r, i) for i in range(len(r.sequences))] for r in requests]
    assert outputs == [engine.delivered[request.request_id] for request in requests]
    return outputs, engine


@pytest.mark.parametrize(
    ("depth", "preempt_at"), [(1, frozenset()), (2, frozenset()), (2, frozenset({5, 6, 9}))]
)
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("way", list(WAYS))
def test_tokens_are_the_same_when_rows_get_several_in_a_step(
    compute: Compute, way: str, kind: str, depth: int, preempt_at: frozenset[int]
) -> None:
    expected, alone = _serve(compute, KINDS[kind], ALONE, 1, frozenset())
    outputs, engine = _serve(compute, KINDS[kind], WAYS[way], depth, preempt_at)
    assert outputs == expected
    assert way == "drafts" or engine.num_steps < alone.num_steps
    _assert_scores_are(engine, alone)


@pytest.mark.parametrize("kind", list(KINDS))
def test_tokens_are_the_same_when_a_draft_guesses_them(
    compute: Compute, kind: str, draft: LoadedProposer
) -> None:
    expected, alone = _serve(compute, KINDS[kind], ALONE, 1, frozenset())
    outputs, engine = _serve(compute, KINDS[kind], WAYS["runs"], 2, frozenset({5, 6, 9}), draft)
    assert outputs == expected
    assert engine.num_steps < alone.num_steps
    _assert_scores_are(engine, alone)


def _assert_scores_are(engine: _Engine, alone: _Engine) -> None:
    assert engine.scores.keys() == alone.scores.keys()
    for key, scores in engine.scores.items():
        others = alone.scores[key]
        assert [s.position for s in scores] == [s.position for s in others]
        assert [s.logprob for s in scores] == pytest.approx([s.logprob for s in others], abs=1e-4)


def test_drafts_are_right_when_text_repeats_itself(compute: Compute) -> None:
    # What such a model finds most probable comes again and again.
    expected, _ = _serve(compute, GREEDY, ALONE, 1, frozenset())
    outputs, engine = _serve(compute, GREEDY, WAYS["drafts"], 1, frozenset())
    assert outputs == expected
    assert engine.scheduler.draft_totals.num_accepted > 0
