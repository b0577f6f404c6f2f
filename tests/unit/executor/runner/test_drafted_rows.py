"""Rows with drafts in steps of tiny models: tokens and scores are those of steps of one token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from executor_service.backends import compute_on_cpu
from executor_service.device import KVCache
from executor_service.model import InputBatch, LoadedModel, PagedModel, torch_model
from executor_service.runner import CacheConfig, ModelRunner, build_runner, forward_pass
from executor_service.steps import SamplingParams
from tests.support.devices.late_device import LateStreams, late_runner
from tests.support.models.tiny_models import VOCAB_SIZE, load_tiny_model
from tests.support.steps import step_driver
from tests.support.steps.step_driver import DrivenSequence, drive, drive_drafted

NUM_BLOCKS = 160


POOLS = CacheConfig(block_size=4, num_device_blocks=NUM_BLOCKS, num_host_blocks=0)
RANDOM = SamplingParams(temperature=1.0, top_p=0.95, num_logprobs=3)
PARAMS = (
    SamplingParams(temperature=0.0, num_logprobs=0),
    RANDOM,
    replace(RANDOM, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    replace(RANDOM, min_tokens=9, suppressed_token_ids=tuple(range(0, VOCAB_SIZE, 2))),
    replace(RANDOM, logit_bias={9: 3.0, 33: 3.0}, num_prompt_logprobs=2),
    replace(RANDOM, bad_words_token_ids=tuple((a, b) for a in range(20) for b in range(80))),
    SamplingParams(temperature=0.7, stop_token_ids=frozenset(range(0, VOCAB_SIZE, 9))),
)


def make_sequences() -> list[DrivenSequence]:
    """The prompt of the last one is as long as several tiles of native attention."""
    lengths = [1, 5, 17, 30, 9, 12, 3, 200]
    return [
        DrivenSequence(
            [(7 * i * i + number) % VOCAB_SIZE for i in range(length)],
            10 + number,
            PARAMS[number % len(PARAMS)],
            seed=number - 3,
        )
        for number, length in enumerate(lengths)
    ]


def assert_same(
    make_runner: Callable[[], ModelRunner],
    chunk_size: int | None = None,
    atol: float = 2e-4,
) -> None:
    """Drives sequences with drafts and without, in a runner of its own each, and compares them."""
    sequences, truths = make_sequences(), make_sequences()
    runner = make_runner()
    size = runner.cache.block_size
    drive(runner, truths, block_size=size, num_blocks=NUM_BLOCKS, chunk_size=chunk_size)
    num_taken = drive_drafted(
        make_runner(),
        sequences,
        truths,
        block_size=size,
        num_blocks=NUM_BLOCKS,
        vocab_size=VOCAB_SIZE,
        chunk_size=chunk_size,
        seed=7,
    )
    assert num_taken > 20
    for sequence, truth in zip(sequences, truths, strict=True):
        assert sequence.output == truth.output
        np.testing.assert_allclose(sequence.logprobs, truth.logprobs, rtol=0, atol=atol)
        assert sequence.prompt_logprobs == pytest.approx(truth.prompt_logprobs, rel=0, abs=atol)


class _Counting:
    """A model; to `joined` it adds how many lines of a pass are computed in the row before."""

    def __init__(self, model: PagedModel, joined: list[int]) -> None:
        self._model = model
        self._joined = joined

    def logits(self, batch: InputBatch) -> Tensor:
        self._joined.append(len(batch.readout.sampling_rows) - batch.rows.num_rows)
        return self._model.logits(batch)


@pytest.mark.parametrize(
    ("architecture", "max_scored"),
    [("llama", None), ("llama", 3), ("gemma2", None), ("gpt_oss", None)],
)
def test_tokens_are_the_same_when_plain_torch_verifies_drafts(
    tmp_path: Path, architecture: str, max_scored: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if max_scored is not None:
        # Steps are run in parts.
        monkeypatch.setattr(forward_pass, "MAX_SCORED_TOKENS", max_scored)
    loaded = load_tiny_model(architecture, tmp_path, seed=2)
    assert_same(lambda: build_runner(loaded, POOLS), chunk_size=None if max_scored else 50)


@pytest.mark.cases(4)
@pytest.mark.parametrize("max_joined", [32, 2])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss"])
def test_tokens_are_the_same_when_a_device_verifies_drafts(
    tmp_path: Path, architecture: str, max_joined: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are computed in the row before them."""
    # A device with memory of its own lets no row run on that has drafts.
    monkeypatch.setattr(step_driver, "_MAX_RUN_ON", 0)
    monkeypatch.setattr(forward_pass, "MOST_PROMPTS", max_joined)
    loaded = load_tiny_model(architecture, tmp_path, seed=2)
    joined: list[int] = []

    def make_model(loaded: LoadedModel, cache: KVCache) -> PagedModel:
        return _Counting(torch_model(loaded, cache), joined)

    assert_same(lambda: late_runner(loaded, POOLS, LateStreams(), make_model))
    assert (max(joined) > 5) == (max_joined == 32)


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_are_the_same_bits_when_a_native_decoder_verifies_drafts(
    tmp_path: Path, architecture: str, dtype: str
) -> None:
    """Deterministic mode serves with this decoder."""
    loaded = load_tiny_model(architecture, tmp_path, dtype, seed=2)
    compute = compute_on_cpu(lambda: loaded, loaded, 16, is_int8=False)
    assert compute.is_batch_invariant
    pools = replace(POOLS, block_size=compute.block_size)
    assert_same(
        lambda: build_runner(compute.loaded, pools, compute.make_model, compute.draw), atol=0
    )
