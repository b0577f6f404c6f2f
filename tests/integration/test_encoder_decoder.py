"""Encoder-decoder models: tokens equal those of Hugging Face `generate`, whatever moves blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
import torch
from torch import Tensor

from executor_service.backends import AUTO, TORCH, choose_compute
from executor_service.checkpoint import ModelConfig, load_model
from scheduler_service.scheduler.values import (
    BeamParams,
    EarlyStopping,
    Feature,
    PreemptionMode,
    Request,
    SamplingParams,
    Speculation,
)
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve_kernels.cpu import NativeLibrary
from tests.support.covering import covering
from tests.support.models.model_pair import ModelPair, ObservedEngine, model_pairs
from tests.support.models.philox import random_number

ARCHITECTURES = (
    "t5",
    "mt5",
    "umt5",
    "longt5",
    "bart",
    "mbart",
    "marian",
    "m2m_100",
    "pegasus",
    "plbart",
    "led",
    "blenderbot",
    "blenderbot-small",
)
NUM_OUTPUT_TOKENS = 12
UNLUCKY = 13
# (encoder tokens, decoder prompt): two requests have the same encoder's input.
LENGTHS = ((1, 1), (19, 3), (19, 1), (40, 17), (7, 2))


class Pressure(Enum):
    """What becomes of requests that are preempted; NONE: none is."""

    NONE = "none"
    SWAP = "swap"
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class Case:
    """How the requests are served. `is_torch`: in plain torch, not in the fastest code."""

    architecture: str
    is_torch: bool
    block_size: int
    budget: int
    pressure: Pressure
    depth: int

    def __str__(self) -> str:
        code = "torch" if self.is_torch else "fast"
        return (
            f"{self.architecture}-{code}-block{self.block_size}-budget{self.budget}"
            f"-{self.pressure.value}-depth{self.depth}"
        )

    @property
    def options(self) -> dict[str, Any]:
        """Pools that hold all sequences, or two blocks more than the longest needs."""
        needs = [
            -(-encoder // self.block_size) - (-(prompt + NUM_OUTPUT_TOKENS) // self.block_size)
            for encoder, prompt in LENGTHS
        ]
        if self.pressure is Pressure.NONE:
            return {"num_device_blocks": sum(needs)}
        is_swap = self.pressure is Pressure.SWAP
        return {
            "num_device_blocks": max(needs) + 2,
            "num_host_blocks": sum(needs) if is_swap else 0,
            "preemption_mode": PreemptionMode.SWAP if is_swap else PreemptionMode.RECOMPUTE,
            "preempt_at": {2, 4, 9, 27},
        }


def _request(
    index: int, encoder: list[int], prompt: list[int], seed: int = 0, **params: object
) -> Request:
    values = {"temperature": 0.0, "max_tokens": NUM_OUTPUT_TOKENS} | params
    return Request.create(
        str(index),
        prompt,
        SamplingParams(**values),  # type: ignore[arg-type]
        arrival=index,
        seed=seed,
        encoder_token_ids=encoder,
    )


class EngineOfErrors(ObservedEngine):
    """Lets rows fail. `errors`: their texts."""

    def __init__(self, pair: ModelPair, **options: Any) -> None:  # noqa: ANN401
        super().__init__(pair, **options)
        self.errors: list[str] = []

    def _check(self, result: pb.StepResult) -> None:
        self.errors += [error.message for error in result.row_errors]


class EncodedPair:
    """An encoder-decoder model, run by Hugging Face and by us."""

    def __init__(self, pair: ModelPair) -> None:
        self.pair = pair
        self._computes = {
            name: choose_compute(lambda: load_model(ModelConfig(str(pair.directory))), name, None)
            for name in (TORCH, AUTO)
        }

    @property
    def questions(self) -> list[tuple[list[int], list[int]]]:
        """Encoder tokens and decoder prompt of each request; the same length has the same ones."""
        prompts = self.pair.prompts
        return [(prompts([e], seed=1)[0], prompts([p])[0]) for e, p in LENGTHS]

    def answer(self, encoder: list[int], prompt: list[int], **options: object) -> Any:  # noqa: ANN401
        """Returns what `generate` returns."""
        return self.pair.reference.generate(
            torch.tensor([encoder]),
            attention_mask=torch.ones(1, len(encoder), dtype=torch.long),
            decoder_input_ids=torch.tensor([prompt]),
            # Otherwise it would be added in front.
            decoder_start_token_id=prompt[0],
            **(
                {
                    "do_sample": False,
                    "max_new_tokens": NUM_OUTPUT_TOKENS,
                    "eos_token_id": None,
                    "pad_token_id": 0,
                    "forced_bos_token_id": None,
                    "forced_eos_token_id": None,
                    "bad_words_ids": None,
                    "num_beams": 1,
                }
                | options
            ),
        )

    def engine(self, name: str = TORCH, **options: object) -> ObservedEngine:
        """Returns an engine with the code of a value of --attention-backend."""
        return ObservedEngine(self.pair, **self._options(name, options))

    def engine_of_errors(self, **options: object) -> EngineOfErrors:
        """Returns an engine in plain torch whose rows may fail."""
        return EngineOfErrors(self.pair, **self._options(TORCH, options))

    def _options(self, name: str, options: Mapping[str, object]) -> dict[str, Any]:
        values: dict[str, Any] = {
            "block_size": 8,
            "num_device_blocks": 64,
            "features": frozenset(Feature),
        }
        return {**values, "compute": self._computes[name], **options}


@pytest.fixture(scope="module")
def encoded_pair_of(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], EncodedPair]:
    """Makes the pair of an architecture when it is first asked for."""
    pair_of = model_pairs(tmp_path_factory.mktemp)
    made: dict[str, EncodedPair] = {}

    def get(architecture: str) -> EncodedPair:
        if architecture not in made:
            made[architecture] = EncodedPair(pair_of(architecture))
        return made[architecture]

    return get


def cases() -> list[Case]:
    options = {
        "architecture": ARCHITECTURES,
        "is_torch": (False, True),
        "block_size": (1, 8, 16),
        "budget": (7, 64),
        "pressure": tuple(Pressure),
        "depth": (1, 2, 3),
    }
    return [Case(**case) for case in covering(options, strength=2)]  # type: ignore[arg-type]


@pytest.mark.parametrize("case", cases(), ids=str)
def test_tokens_equal_those_of_generate(
    case: Case, encoded_pair_of: Callable[[str], EncodedPair], native_library: NativeLibrary
) -> None:
    encoded = encoded_pair_of(case.architecture)
    engine = encoded.engine(
        TORCH if case.is_torch else AUTO,
        depth=case.depth,
        block_size=case.block_size,
        max_num_batched_tokens=case.budget,
        **case.options,
    )
    questions = encoded.questions

    outputs = engine.serve(*(_request(index, *each) for index, each in enumerate(questions)))

    for (encoder, prompt), output in zip(questions, outputs, strict=True):
        answer = encoded.answer(encoder, prompt)[0, len(prompt) :].tolist()
        assert output == [answer]
    assert (engine.core.num_preemptions > 0) == (case.pressure is not Pressure.NONE)
    assert (engine.core.num_swapped_out > 0) == (case.pressure is Pressure.SWAP)


@pytest.mark.parametrize("architecture", ["t5", "bart"])
@pytest.mark.parametrize("name", [TORCH, AUTO])
def test_beams_equal_those_of_generate(
    architecture: str,
    name: str,
    encoded_pair_of: Callable[[str], EncodedPair],
    native_library: NativeLibrary,
) -> None:
    encoded = encoded_pair_of(architecture)
    engine = encoded.engine(name, preempt_at={4, 7}, num_host_blocks=64)
    questions = encoded.questions
    params: dict[str, Any] = {"n": 3, "beam": BeamParams(4, 1.0, EarlyStopping.HEURISTIC)}

    outputs = engine.serve(
        *(_request(index, *each, **params) for index, each in enumerate(questions))
    )

    for (encoder, prompt), output in zip(questions, outputs, strict=True):
        answer = encoded.answer(encoder, prompt, num_beams=4, num_return_sequences=3)
        assert output == answer[:, len(prompt) :].tolist()
    assert engine.core.num_preemptions > 0


@torch.inference_mode()
def sampled_tokens(
    encoded: EncodedPair, encoder: list[int], prompt: list[int], seed: int, temperature: float
) -> list[int]:
    """Tokens drawn from the logits of Hugging Face by the contract's random numbers."""
    tokens = list(prompt)
    for _ in range(NUM_OUTPUT_TOKENS):
        logits = encoded.pair.reference(
            input_ids=torch.tensor([encoder]), decoder_input_ids=torch.tensor([tokens])
        ).logits[0, -1]
        sums = (logits / temperature).double().softmax(-1).cumsum(-1)
        number = random_number(seed, len(tokens))
        tokens.append(int((sums > number).nonzero()[0]))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("architecture", ["t5", "marian"])
def test_sampled_tokens_are_drawn_from_the_logits_of_hugging_face(
    architecture: str,
    encoded_pair_of: Callable[[str], EncodedPair],
    native_library: NativeLibrary,
) -> None:
    encoded = encoded_pair_of(architecture)
    engine = encoded.engine(AUTO, preempt_at={3})
    requests = [
        _request(index, *question, seed=index * 2**33 + 7, temperature=0.8)
        for index, question in enumerate(encoded.questions)
    ]
    outputs = engine.serve(*requests)
    for question, request, output in zip(encoded.questions, requests, outputs, strict=True):
        assert output == [sampled_tokens(encoded, *question, request.sequence.seed, 0.8)]


@pytest.mark.parametrize("architecture", ["bart", "t5"])
def test_steps_of_several_tokens_bring_those_of_generate(
    architecture: str,
    encoded_pair_of: Callable[[str], EncodedPair],
    native_library: NativeLibrary,
) -> None:
    encoded = encoded_pair_of(architecture)
    repetitive = ([5, 6, 7, 8] * 3, [9, 10, 11, 9, 10, 11, 9, 10])
    questions = [repetitive, *encoded.questions]
    expected = [[encoded.answer(*each)[0, len(each[1]) :].tolist()] for each in questions]
    requests = [_request(index, *each) for index, each in enumerate(questions)]
    drafting = encoded.engine(AUTO, speculation=Speculation.PROMPT_LOOKUP)
    assert drafting.serve(*requests) == expected
    assert drafting.core.draft_totals.num_accepted > 0
    running_on = encoded.engine(AUTO, max_run_ahead=4, max_run_ahead_ms=10**6)
    again = [_request(index, *each) for index, each in enumerate(questions)]
    assert running_on.serve(*again) == expected
    assert max(plan.work.most_tokens for plan in running_on.core.plans) > 1


def test_sequences_of_a_request_share_its_encoder_tokens(
    encoded_pair_of: Callable[[str], EncodedPair],
) -> None:
    encoded = encoded_pair_of("t5")
    encoder, prompt = encoded.questions[3]
    together = encoded.engine()
    [several] = together.serve(_request(0, encoder, prompt, seed=5, n=3, temperature=0.9))
    [other] = encoded.engine(preempt_at={5}).serve(
        _request(0, encoder, prompt, seed=5, n=3, temperature=0.9)
    )
    assert several == other
    assert len({tuple(each) for each in several}) == 3
    # A block table for each sequence, and one for what they attend to.
    assert together.core.max_blocks_in_use <= 5 + 3 * 4


def test_encoder_runs_once_for_all_sequences_of_a_request(
    encoded_pair_of: Callable[[str], EncodedPair],
) -> None:
    encoded = encoded_pair_of("bart")
    encoder, prompt = encoded.questions[3]
    engine = encoded.engine(max_num_batched_tokens=5)
    lengths = count_encodings(engine)
    engine.serve(
        _request(0, encoder, prompt, n=3, temperature=0.9), _request(1, encoder[1:], prompt)
    )
    assert lengths == [40, 39]


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        ([], "the row has no encoder tokens"),
        ([7] * 513, "the row has 513 encoder tokens; allowed: at most 512"),
        ([UNLUCKY] * 9, "ValueError in the forward pass"),
    ],
    ids=("none", "too_many", "raises"),
)
def test_rows_whose_encoder_tokens_cannot_be_encoded_fail_alone(
    encoder: list[int], message: str, encoded_pair_of: Callable[[str], EncodedPair]
) -> None:
    encoded = encoded_pair_of("bart")
    good, prompt = encoded.questions[3]
    engine = encoded.engine_of_errors(num_device_blocks=128, depth=1)
    refuse_unlucky(engine)
    # Both sequences of the bad request read the same blocks.
    requests = [_request(0, encoder, prompt, n=2), _request(1, good, prompt)]
    for request in requests:
        engine.add(request)
    engine.run()
    assert engine.errors
    assert all(message in each for each in engine.errors)
    assert [request.error is None for request in requests] == [False, True]
    expected = encoded.answer(good, prompt)[0, len(prompt) :].tolist()
    assert engine.delivered["1"] == [expected]


def refuse_unlucky(engine: ObservedEngine) -> None:
    """Makes the encoder raise for inputs that are nothing but one token again and again."""
    model: Any = engine.runner.model
    encode = model.encode

    def picky(token_ids: Tensor, blocks: Tensor) -> None:
        if set(token_ids.tolist()) == {UNLUCKY}:
            raise ValueError("the test asked for it")
        encode(token_ids, blocks)

    model.encode = picky


def count_encodings(engine: ObservedEngine) -> list[int]:
    """Returns a list that gets the number of tokens of each encoder's input that is encoded."""
    model: Any = engine.runner.model
    encode, lengths = model.encode, []

    def counted(token_ids: Tensor, blocks: Tensor) -> None:
        lengths.append(len(token_ids))
        encode(token_ids, blocks)

    model.encode = counted
    return lengths
