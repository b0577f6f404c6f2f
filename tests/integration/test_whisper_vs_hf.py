"""Whisper models: tokens equal those of Hugging Face `generate`, whatever moves blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from executor_service.backends import AUTO, TORCH, choose_compute
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.service import decode_batch, encode_answer
from scheduler_service.scheduler.values import (
    BeamParams,
    EarlyStopping,
    EncoderFeatures,
    Feature,
    PreemptionMode,
    Request,
    SamplingParams,
    TranscriptionRules,
)
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve_kernels.cpu import NativeLibrary
from tests.support.models.model_pair import ObservedEngine
from tests.support.models.tiny_whisper import (
    EOS,
    FIRST_TIMESTAMP,
    MAX_TARGET_POSITIONS,
    NO_TIMESTAMPS,
    NUM_MEL_BINS,
    NUM_POSITIONS,
    SAMPLING_RATE,
    START,
    TOKEN_IDS,
    feature_extractor,
    generation_settings,
    make_tiny_whisper,
    noisy_tone,
)

NUM_FEATURES = 2 * NUM_MEL_BINS * NUM_POSITIONS
BLOCK_SIZE = 8
NUM_OUTPUT_TOKENS = 40


@dataclass(frozen=True)
class Question:
    """A second of sound, and what is wanted of it. `language`: None to detect it."""

    seed: int
    language: str | None = "de"
    task: str = "transcribe"
    has_timestamps: bool = False

    @property
    def features(self) -> Tensor:
        """Features [1, M, F]."""
        extracted = feature_extractor()(
            noisy_tone(self.seed), sampling_rate=SAMPLING_RATE, return_tensors="pt"
        )
        features: Tensor = extracted.input_features
        return features

    @property
    def prompt(self) -> list[int]:
        """First tokens of the decoder."""
        prompt = [START, TOKEN_IDS[f"<|{self.language}|>"], TOKEN_IDS[f"<|{self.task}|>"]]
        return prompt if self.has_timestamps else [*prompt, NO_TIMESTAMPS]


QUESTIONS = (
    Question(1),
    Question(2, "en", "translate"),
    Question(2, "en", "translate", has_timestamps=True),
    Question(3, "fr", has_timestamps=True),
    Question(4, "de", has_timestamps=True),
)


class WhisperPair:
    """A Whisper model, run by Hugging Face and by us."""

    def __init__(self, directory: Path) -> None:
        from transformers import WhisperForConditionalGeneration

        make_tiny_whisper(directory, seed=2)
        self.reference: Any = WhisperForConditionalGeneration.from_pretrained(directory)
        self.computes = {
            name: choose_compute(lambda: load_model(ModelConfig(str(directory))), name, None)
            for name in (TORCH, AUTO)
        }

    def answer(self, question: Question, **options: object) -> Any:  # noqa: ANN401
        """Returns the sequences of `generate`, with their prompts."""
        values = {"return_timestamps": question.has_timestamps, "max_new_tokens": NUM_OUTPUT_TOKENS}
        return self.reference.generate(
            question.features,
            language=question.language,
            task=question.task,
            # Otherwise, behind the last timestamp, the same window is begun again.
            force_unique_generate_call=True,
            **(values | options),
        )

    def engine(self, name: str = TORCH, **options: object) -> ObservedEngine:
        """Returns an engine with the code of a value of --attention-backend."""
        compute = self.computes[name]
        values: dict[str, Any] = {
            "block_size": BLOCK_SIZE,
            "num_device_blocks": 96,
            "features": frozenset(Feature),
            "compute": compute,
            "max_model_len": MAX_TARGET_POSITIONS,
            "max_encoder_tokens": NUM_POSITIONS,
            "num_encoder_features": NUM_FEATURES,
            "eos_token_ids": frozenset({EOS}),
        }
        served: Any = SimpleNamespace(served=compute.loaded)
        return ObservedEngine(served, **values | options)


def request(index: int, question: Question, **options: object) -> Request:
    """The request that the gateway makes of a question."""
    settings = generation_settings()
    params: dict[str, Any] = {
        "temperature": 0.0,
        "max_tokens": NUM_OUTPUT_TOKENS,
        "logit_bias": dict.fromkeys(settings["suppress_tokens"], -np.inf),
        "transcription": TranscriptionRules(
            tuple(settings["begin_suppress_tokens"]),
            FIRST_TIMESTAMP if question.has_timestamps else None,
            EOS if question.has_timestamps else 0,
            settings["max_initial_timestamp_index"] if question.has_timestamps else None,
        ),
    }
    return Request.create(
        str(index),
        question.prompt,
        SamplingParams(**params | options),
        arrival=index,
        seed=0,
        encoder_features=features_of(question),
    )


def features_of(question: Question) -> EncoderFeatures:
    return EncoderFeatures(question.features.numpy().tobytes(), NUM_POSITIONS)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> WhisperPair:
    return WhisperPair(tmp_path_factory.mktemp("whisper"))


@pytest.mark.parametrize("name", [TORCH, AUTO])
@pytest.mark.parametrize("mode", [None, PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_tokens_equal_those_of_generate(
    name: str, mode: PreemptionMode | None, pair: WhisperPair, native_library: NativeLibrary
) -> None:
    options: dict[str, Any] = {}
    if mode is not None:
        options = {
            # Two requests fit at once.
            "num_device_blocks": 28,
            "num_host_blocks": 64 if mode is PreemptionMode.SWAP else 0,
            "preemption_mode": mode,
            "preempt_at": {2, 4, 9, 27},
        }
    engine = pair.engine(name, max_num_batched_tokens=7, **options)

    outputs = engine.serve(*(request(index, each) for index, each in enumerate(QUESTIONS)))

    for question, output in zip(QUESTIONS, outputs, strict=True):
        answer = pair.answer(question)[0, len(question.prompt) :].tolist()
        assert output == [answer]
    assert (engine.core.num_preemptions > 0) == (mode is not None)
    assert (engine.core.num_swapped_out > 0) == (mode is PreemptionMode.SWAP)


def test_timestamps_are_sampled_in_pairs(pair: WhisperPair) -> None:
    [[output]] = pair.engine().serve(request(0, QUESTIONS[3]))
    timestamps = [token - FIRST_TIMESTAMP for token in output if token >= FIRST_TIMESTAMP]
    assert output[0] >= FIRST_TIMESTAMP
    assert timestamps[0] <= generation_settings()["max_initial_timestamp_index"]
    assert len(timestamps) >= 4
    assert timestamps == sorted(timestamps)


@pytest.mark.parametrize("name", [TORCH, AUTO])
def test_beams_equal_those_of_generate(
    name: str, pair: WhisperPair, native_library: NativeLibrary
) -> None:
    options = {"num_beams": 4, "suppress_tokens": None, "begin_suppress_tokens": None}
    kept = {each: getattr(pair.reference.generation_config, each) for each in options}
    beams = {"beam": BeamParams(4, 1.0, EarlyStopping.HEURISTIC)}
    engine = pair.engine(name, preempt_at={4, 7}, num_host_blocks=64)
    plain: dict[str, object] = {"transcription": None, "logit_bias": {}}
    [output] = engine.serve(request(0, QUESTIONS[0], **plain, **beams))
    try:
        for each, value in options.items():
            setattr(pair.reference.generation_config, each, value)
        answer = pair.answer(QUESTIONS[0])[0, len(QUESTIONS[0].prompt) :].tolist()
    finally:
        for each, value in kept.items():
            setattr(pair.reference.generation_config, each, value)
    assert output == [answer]
    assert engine.core.num_preemptions > 0


def test_language_is_detected_as_by_hugging_face(pair: WhisperPair) -> None:
    languages = list(generation_settings()["lang_to_id"].values())
    questions = [Question(seed) for seed in range(8)]
    requests = [
        Request.create(
            str(index),
            [START],
            SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=frozenset(languages)),
            arrival=index,
            seed=0,
            encoder_features=features_of(each),
        )
        for index, each in enumerate(questions)
    ]
    outputs = pair.engine().serve(*requests)
    expected = [int(pair.reference.detect_language(each.features)) for each in questions]
    assert [output[0][0] for output in outputs] == expected
    assert len(set(expected)) > 1


def test_prefix_is_shared_only_by_requests_with_the_same_audio(pair: WhisperPair) -> None:
    engine = pair.engine(prefix_caching=True, block_size=2, num_device_blocks=256)
    first, again, other = (request(i, Question(seed)) for i, seed in enumerate((1, 1, 2)))
    for each in (first, again, other):
        engine.serve(each)
    assert [each.num_cached_tokens for each in (first, again, other)] == [0, 2, 0]
    assert engine.delivered["0"] == engine.delivered["1"]


SPOILED: dict[str, tuple[dict[str, bytes], str]] = {
    "too few": (
        {
            "encoder_feature_offsets": np.array([0, 8], "<i4").tobytes(),
            "encoder_features": bytes(32),
        },
        "new_rows.encoder_feature_offsets",
    ),
    "offsets": (
        {"encoder_feature_offsets": np.array([0, 5], "<i4").tobytes()},
        "new_rows.encoder_feature_offsets",
    ),
    "bytes": ({"encoder_features": bytes(5)}, "new_rows.encoder_features"),
    "positions": (
        {"num_encoder_tokens": np.array([NUM_POSITIONS - 1], "<i4").tobytes()},
        "new_rows.num_encoder_tokens",
    ),
    "tokens": (
        {
            "encoder_offsets": np.array([0, NUM_POSITIONS], "<i4").tobytes(),
            "encoder_token_ids": bytes(4 * NUM_POSITIONS),
        },
        "new_rows.encoder_offsets",
    ),
}


@pytest.mark.parametrize("case", list(SPOILED))
def test_batch_with_wrong_features_is_refused_by_field(case: str, pair: WhisperPair) -> None:
    columns, field = SPOILED[case]
    engine = pair.engine(depth=1)
    engine.add(request(0, QUESTIONS[0]))
    engine.fill()
    batch = pb.ScheduleBatch.FromString(engine.in_flight[0][1])
    for name, column in columns.items():
        setattr(batch.new_rows, name, column)
    result = encode_answer(engine.executor.execute(decode_batch(batch)))
    assert result.status == pb.STEP_STATUS_REFUSED
    assert result.error.field.startswith(field), result.error


def test_row_with_features_that_are_not_finite_fails_alone(pair: WhisperPair) -> None:
    engine = pair.engine(depth=1, max_num_encoder_tokens=2 * NUM_POSITIONS)
    bad, good = request(0, QUESTIONS[0]), request(1, QUESTIONS[1])
    for each in (bad, good):
        engine.add(each)
    engine.fill()
    batch = pb.ScheduleBatch.FromString(engine.in_flight[0][1])
    features = np.frombuffer(batch.new_rows.encoder_features, "<f4").copy()
    features[7] = np.nan
    batch.new_rows.encoder_features = features.tobytes()
    result = encode_answer(engine.executor.execute(decode_batch(batch)))
    assert result.status == pb.STEP_STATUS_OK
    [error] = result.row_errors
    assert "not finite" in error.message
