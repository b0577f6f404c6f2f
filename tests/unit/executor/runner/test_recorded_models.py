"""What is recorded when, and what serves where a recording fails or is wrong."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from executor_service.errors import RecordingFailed
from executor_service.model.loaded_model import LoadedModel
from executor_service.model.paged_model import MakeModel, torch_model
from executor_service.runner.pool_sizes import CacheConfig, build_runner
from tests.support.devices.recorded_ops import RecordedOps, static_model
from tests.support.steps.step_driver import DrivenSequence, Row, drive
from tests.unit.executor.runner.recorded_steps import (
    BLOCK_SIZE,
    MAX_NUM_TOKENS,
    SHAPES,
    Turns,
    cache_of,
    logits_of,
    random_decodes,
    recorded_models,
)


@pytest.mark.parametrize(
    ("make_model", "fails", "event"),
    [
        (static_model, True, "cuda_graphs_not_recorded"),
        # It decides on the host how many keys a row has.
        (torch_model, False, "cuda_graphs_refused"),
    ],
)
def test_graphs_say_an_error_and_serve_without_when_recording_fails(
    loaded: LoadedModel,
    make_model: MakeModel,
    fails: bool,
    event: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = cache_of(loaded)
    recorder = RecordedOps(fails=fails)
    model = recorded_models(make_model, lambda: recorder).make(loaded, cache)
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1
    assert event in errors[0]
    num_tried = recorder.num_replayed
    assert logits_of(model, random_decodes(random.Random(8), 3)).isfinite().all()
    assert recorder.num_replayed == num_tried


def test_graphs_are_not_tried_again_when_they_could_not_be_recorded(loaded: LoadedModel) -> None:
    recorders: list[RecordedOps] = []

    def make_recorder() -> RecordedOps:
        recorders.append(RecordedOps(fails=True))
        return recorders[-1]

    make = recorded_models(static_model, make_recorder).make
    for _ in range(2):
        make(loaded, cache_of(loaded))
    assert len(recorders) == 1


def test_steps_are_launched_when_recordings_are_left_out(loaded: LoadedModel) -> None:
    """So that what is launched for steps that are not recorded can be compiled before serving."""
    recorder = RecordedOps()
    recorded = recorded_models(static_model, lambda: recorder, None, MAX_NUM_TOKENS)
    model = recorded.make(loaded, cache_of(loaded))
    assert recorded.recorded is not None
    assert recorded.recorded.num_graphs == len(SHAPES)
    rows = [*random_decodes(random.Random(14), 2), Row([5, 6, 7], 0, (38,), 3)]
    counts = [recorder.num_replayed]
    with recorded.left_out():
        logits_of(model, rows)
        counts.append(recorder.num_replayed)
    logits_of(model, rows)
    counts.append(recorder.num_replayed)
    assert (counts[1] - counts[0], counts[2] - counts[1]) == (0, 1)


def test_the_largest_of_each_kind_is_recorded_when_memory_is_measured(loaded: LoadedModel) -> None:
    recorders = [RecordedOps(), RecordedOps()]
    recorded = recorded_models(static_model, iter(recorders).__next__, None, MAX_NUM_TOKENS)
    config = CacheConfig(
        BLOCK_SIZE, max_num_rows=2, max_num_batched_tokens=8, max_cpu_pool_bytes=None
    )
    config = replace(config, num_host_blocks=0, max_auto_blocks=60)
    build_runner(loaded, config, recorded.make, make_measured=recorded.make_largest)
    assert [recorder.num_recorded for recorder in recorders] == [2, len(SHAPES)]


class _BreaksOff(RecordedOps):
    """In the middle of a recording."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        raise RecordingFailed("capture was invalidated")


def test_runner_is_not_made_when_a_recording_breaks_off(loaded: LoadedModel) -> None:
    make = recorded_models(static_model, _BreaksOff).make
    config = CacheConfig(BLOCK_SIZE, num_device_blocks=60, num_host_blocks=0)
    with pytest.raises(RecordingFailed):
        build_runner(loaded, config, make)
    measured = replace(config, num_device_blocks=None, max_num_rows=2, max_num_batched_tokens=8)
    measured = replace(measured, max_cpu_pool_bytes=None)
    with pytest.raises(RecordingFailed):
        build_runner(loaded, measured, make)


class _Broken(RecordedOps):
    """Its second recording spoils the logits."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        replay = super().record(run)
        return replay if self.num_recorded != 2 else partial(self._spoil, run)

    def _spoil(self, run: Callable[[], None]) -> None:
        graphs: Any = run
        graphs.func.__self__._outputs.logits.fill_(torch.nan)


class _Frozen(RecordedOps):
    """Replays nothing."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        super().record(run)
        return lambda: None


@pytest.mark.parametrize("make_recorder", [_Frozen, _Broken])
def test_graphs_say_an_error_and_serve_without_when_a_replay_is_wrong(
    loaded: LoadedModel,
    make_recorder: Callable[[], RecordedOps],
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = cache_of(loaded)
    model = recorded_models(static_model, make_recorder).make(loaded, cache)
    assert "cuda_graphs_refused" in caplog.text
    rows = random_decodes(random.Random(9), 3)
    expected = logits_of(Turns(loaded, cache), rows)
    assert torch.equal(logits_of(model, rows), expected)


def test_runner_samples_the_same_tokens_when_decodes_are_recorded(loaded: LoadedModel) -> None:
    outputs = []
    for make_model in (torch_model, recorded_models(static_model, RecordedOps).make):
        config = CacheConfig(BLOCK_SIZE, num_device_blocks=60, num_host_blocks=0)
        runner = build_runner(loaded, config, make_model)
        sequences = [
            DrivenSequence([(7 * i + j) % 140 + 3 for j in range(3 + 4 * i)], 9, start_step=2 * i)
            for i in range(4)
        ]
        drive(runner, sequences, block_size=BLOCK_SIZE, num_blocks=60, chunk_size=5)
        outputs.append([sequence.output for sequence in sequences])
    assert outputs[0] == outputs[1]
