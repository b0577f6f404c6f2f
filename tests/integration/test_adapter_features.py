"""Adapters with every other feature: outputs equal those of the merged model without adapters.

PEFT merges each adapter into a copy of the model. The oracle is the same scheduler core and
executor with that copy; other tests prove that they serve a plain model as Hugging Face does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from executor_service.adapters import read_adapter
from executor_service.backends import AUTO, TORCH, Compute, choose_compute
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.grammars import CompiledGrammars, GrammarCompiler
from scheduler_service.scheduler.values import (
    BeamParams,
    Completion,
    EarlyStopping,
    Feature,
    Grammar,
    Request,
    ScoredToken,
    Speculation,
    StepEvents,
)
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve_kernels.cpu import NativeLibrary
from tests.support.grammars.sampled_texts import EOS, byte_level_texts
from tests.support.models.model_pair import ModelPair, ObservedEngine, make_request
from tests.support.models.peft_adapters import files_of, make_adapter

BLOCK_SIZE = 8
NUM_OUTPUT_TOKENS = 16
LOGPROB_TOLERANCE = 1e-4
# The second adapter changes embeddings and the output head, too.
OPTIONS: Mapping[str, dict[str, Any]] = {
    "a": {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"},
    "b": {"r": 2, "target_modules": ["embed_tokens", "v_proj", "lm_head"]},
}
NAMES = ("", "a", "b")
PROMPT_LENS = (5, 33)

GREEDY: dict[str, Any] = {"max_tokens": NUM_OUTPUT_TOKENS}
RANDOM = GREEDY | {"temperature": 0.9}
# Few tokens come again and again, so that prompt lookup finds them.
FEW = RANDOM | {"allowed_token_ids": frozenset(range(4, 8))}
GRAMMAR = RANDOM | {"grammar": Grammar("regex", ("[a-f]{2,9}(=[0-9]{1,3})?",))}
STOP = {"stop_token_ids": frozenset(range(4, 160, 9))}
KINDS: Mapping[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "greedy_few": FEW | {"temperature": 0.0},
    "random": RANDOM,
    "cut": RANDOM | {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": FEW | {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "biases": FEW | {"logit_bias": {5: 3.0, 6: -3.0}, "bad_words_token_ids": ((7,), (5, 6))},
    "ends": RANDOM | STOP,
    "ends_late": RANDOM | STOP | {"min_tokens": 5},
    "grammar": GRAMMAR,
    "scores": FEW | {"num_logprobs": 2, "num_prompt_logprobs": 2},
    "several": RANDOM | {"n": 3},
    "best": FEW | STOP | {"n": 2, "best_of": 4, "num_logprobs": 0},
    "beams": GREEDY | STOP | {"n": 3, "beam": BeamParams(3, 0.5, EarlyStopping.HEURISTIC)},
}
WAYS: Mapping[str, dict[str, Any]] = {
    "alone": {},
    "drafts": {"speculation": Speculation.PROMPT_LOOKUP, "max_draft_tokens": 5},
    "runs": {"max_run_ahead": 7},
    "both": {"max_run_ahead": 4, "speculation": Speculation.PROMPT_LOOKUP},
}

PROMPT = -1
Scores = defaultdict[int, list[ScoredToken]]


@dataclass(frozen=True, slots=True)
class Output:
    """All that a request got. `scores`: by sequence; those of the prompt by PROMPT."""

    token_ids: Sequence[Sequence[int]]
    scores: Scores
    completions: Sequence[Completion]


@dataclass(frozen=True, slots=True)
class AdapterFolders:
    """An adapter, and the model into which it is merged."""

    adapter: Path
    merged: Path


class Engine(ObservedEngine):
    """Keeps the scores of tokens; every step takes the same time by its result."""

    def __init__(
        self, pair: ModelPair, compute: Compute, compiler: GrammarCompiler, **options: object
    ) -> None:
        grammars = CompiledGrammars(byte_level_texts().vocabulary, compiler, max_wait_s=60.0)
        values: dict[str, Any] = {
            "eos_token_ids": frozenset({EOS}),
            "block_size": BLOCK_SIZE,
            "num_device_blocks": 160,
            "max_num_seqs": 24,
            "features": frozenset(Feature),
            "max_adapters": 2,
            "max_run_ahead_ms": 10_000,
        }
        super().__init__(pair, compute=compute, grammars=grammars, **(values | options))
        self._scores: dict[str, Scores] = defaultdict(lambda: defaultdict(list))

    def outputs(self, *requests: Request) -> list[Output]:
        """Serves the requests together."""
        tokens = self.serve(*requests)
        return [
            Output(token_ids, self._scores[request.request_id], request.completions)
            for request, token_ids in zip(requests, tokens, strict=True)
        ]

    def _check(self, result: pb.StepResult) -> None:
        # A row that ended within a run fails in the step behind it.
        assert result.status == pb.STEP_STATUS_OK, result
        result.timings.forward_us, result.timings.sample_us = 1000, 0

    def _deliver(self, events: StepEvents) -> StepEvents:
        for request, scored in events.prompt_logprobs:
            self._scores[request.request_id][PROMPT] += scored
        for event in events.tokens:
            if event.scored is not None:
                sequence = event.sequence
                self._scores[sequence.request.request_id][sequence.index].append(event.scored)
        return super()._deliver(events)


class Served:
    """A model with adapters, and with each of them merged, all run by the same code."""

    def __init__(
        self,
        pair: ModelPair,
        folders: Mapping[str, AdapterFolders],
        code: str,
        compiler: GrammarCompiler,
    ) -> None:
        """`code`: value of --attention-backend."""
        self.pair = pair
        self._compiler = compiler
        models = {"": pair.directory, **{name: each.merged for name, each in folders.items()}}
        self._computes = {
            name: choose_compute(partial(load_model, ModelConfig(str(model))), code, BLOCK_SIZE)
            for name, model in models.items()
        }
        loaded = self._computes[""].loaded
        self._adapters = {
            name: read_adapter(name, files_of(each.adapter), loaded, max_rank=8)
            for name, each in folders.items()
        }
        self._expected: dict[str, list[Output]] = {}

    def engine(self, **options: object) -> Engine:
        """Returns an engine of the model with adapters."""
        engine = Engine(self.pair, self._computes[""], self._compiler, **options)
        engine.runner.adapters.by_name = self._adapters
        return engine

    def expected(self, kind: str) -> list[Output]:
        """Returns the outputs of merged models for each prompt and each of NAMES."""
        if kind not in self._expected:
            each = [
                Engine(self.pair, self._computes[name], self._compiler).outputs(
                    *self.requests(kind, name)
                )
                for name in NAMES
            ]
            self._expected[kind] = [output for outputs in each for output in outputs]
        return self._expected[kind]

    def requests(self, kind: str, name: str, adapter: str = "") -> list[Request]:
        """Returns a request for each prompt, with seeds that `name` decides."""
        first = len(PROMPT_LENS) * NAMES.index(name)
        return [
            make_request(first + index, prompt, seed=first + index, adapter=adapter, **KINDS[kind])
            for index, prompt in enumerate(self.pair.prompts(PROMPT_LENS))
        ]


@pytest.fixture(scope="module")
def pair_and_folders(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[ModelPair, Mapping[str, AdapterFolders]]:
    sizes = {"vocab_size": byte_level_texts().size, "eos_token_id": EOS}
    pair = ModelPair("llama", tmp_path_factory.mktemp("llama"), **sizes)
    folders = {}
    for seed, (name, options) in enumerate(OPTIONS.items()):
        made = AdapterFolders(tmp_path_factory.mktemp("adapter"), tmp_path_factory.mktemp("merged"))
        adapted = make_adapter(pair.directory, made.adapter, seed=seed, **options)
        adapted.merge_and_unload().save_pretrained(made.merged)
        folders[name] = made
    return pair, folders


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(byte_level_texts().vocabulary)
    yield made
    made.close()


@pytest.fixture(scope="module", params=[TORCH, AUTO])
def served(
    request: pytest.FixtureRequest,
    pair_and_folders: tuple[ModelPair, Mapping[str, AdapterFolders]],
    native_library: NativeLibrary,
    compiler: GrammarCompiler,
) -> Served:
    """The model in plain torch, and in the native decoder."""
    return Served(*pair_and_folders, request.param, compiler)


@pytest.mark.cases(24)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_equal_those_of_merged_models_when_requests_run_together(
    served: Served, kind: str, way: str
) -> None:
    engine = served.engine(depth=2, preempt_at={5, 6, 9}, **WAYS[way])
    assert_equal_to_merged(served, engine, kind)
    assert engine.core.num_preemptions > 0


@pytest.mark.parametrize("kind", ["greedy", "random", "ends", "several"])
def test_outputs_equal_those_of_merged_models_when_rows_run_ahead(
    served: Served, kind: str
) -> None:
    engine = served.engine(depth=1, **WAYS["runs"])
    assert_equal_to_merged(served, engine, kind)
    assert len(engine.core.plans) < NUM_OUTPUT_TOKENS


def test_outputs_equal_those_of_merged_models_when_drafts_are_accepted(served: Served) -> None:
    engine = served.engine(depth=1, **WAYS["drafts"])
    assert_equal_to_merged(served, engine, "greedy_few")
    assert engine.scheduler.draft_totals.num_accepted > 0


def test_prefix_is_cached_for_its_adapter_alone(served: Served) -> None:
    [prompt] = served.pair.prompts([5 * BLOCK_SIZE + 1])
    engine = served.engine(depth=1)
    computed, outputs = {}, {}
    for index, name in enumerate(("a", "b", "", "a", "b", "")):
        before = engine.core.num_computed_tokens
        request = make_request(index, prompt, adapter=name, max_tokens=1, num_logprobs=2)
        [outputs[index]] = engine.outputs(request)
        computed[index] = engine.core.num_computed_tokens - before
    assert computed == {index: len(prompt) if index < 3 else 1 for index in range(6)}
    for index in range(3):
        assert_equal(outputs[index + 3], outputs[index])


def assert_equal_to_merged(served: Served, engine: Engine, kind: str) -> None:
    """Serves the requests of all adapters together."""
    outputs = engine.outputs(
        *(each for name in NAMES for each in served.requests(kind, name, adapter=name))
    )
    for output, expected in zip(outputs, served.expected(kind), strict=True):
        assert_equal(output, expected)
        assert kind != "scores" or output.scores.keys() == {PROMPT, 0}


def assert_equal(output: Output, expected: Output) -> None:
    assert output.token_ids == expected.token_ids
    assert output.scores.keys() == expected.scores.keys()
    for sequence, scores in output.scores.items():
        assert_scores_equal(scores, expected.scores[sequence])
    for completion, other in zip(output.completions, expected.completions, strict=True):
        assert completion.finish_reason is other.finish_reason
        assert completion.score == pytest.approx(other.score, abs=LOGPROB_TOLERANCE)
        assert completion.cumulative_logprob == pytest.approx(
            other.cumulative_logprob, abs=NUM_OUTPUT_TOKENS * LOGPROB_TOLERANCE
        )
        assert_scores_equal(completion.scored, other.scored)


def assert_scores_equal(scores: Sequence[ScoredToken], expected: Sequence[ScoredToken]) -> None:
    assert [(each.position, each.token_id, each.rank) for each in scores] == [
        (each.position, each.token_id, each.rank) for each in expected
    ]
    for score, other in zip(scores, expected, strict=True):
        logprobs = [score.logprob, *(logprob for _, logprob in score.top)]
        others = [other.logprob, *(logprob for _, logprob in other.top)]
        assert logprobs == pytest.approx(others, abs=LOGPROB_TOLERANCE)
