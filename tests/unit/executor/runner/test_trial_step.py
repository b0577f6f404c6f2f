"""The step that is measured before serving: with real runners, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.errors import StepFailed
from executor_service.runner import kernel_warm_up as trial_step
from executor_service.runner.kernel_warm_up import measure_step
from executor_service.runner.model_runner import ModelRunner
from executor_service.runner.pool_sizes import CacheConfig, build_runner
from executor_service.steps.step import StepInput
from tests.support.models.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_model("llama", path, overrides={"num_hidden_layers": 1})
    return path


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "max_num_batched_tokens", "num_tokens", "num_known"),
    [(1, 3, 16, 1, 2), (9, 24, 16, 16, 23), (9, 24, 5, 5, 23), (9, 24, 0, 16, 23), (1, 2, 1, 1, 1)],
)
def test_step_is_measured_when_there_is_little_room(
    model: Path,
    num_blocks: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    num_tokens: int,
    num_known: int,
) -> None:
    loaded = load_model(ModelConfig(str(model), max_model_len=max_model_len))
    runner = build_runner(loaded, CacheConfig(4, num_blocks, num_host_blocks=0))
    trial = measure_step(runner, loaded, max_num_batched_tokens)
    assert trial is not None
    assert (trial.num_tokens, trial.num_attended) == (num_tokens, num_tokens * num_known)
    assert trial.took_us >= 1


@pytest.mark.parametrize(
    ("times_s", "took_s"), [([1.0, 1.4, 2.0, 2.1], 0.1), ([1.0, 3.0], 2.0)], ids=["short", "long"]
)
def test_step_is_measured_again_when_it_was_short(
    model: Path, times_s: list[float], took_s: float
) -> None:
    loaded = load_model(ModelConfig(str(model)))
    runner = build_runner(loaded, CacheConfig(4, 9, num_host_blocks=0))
    times = iter(times_s)
    trial = measure_step(runner, loaded, 16, lambda: next(times))
    assert trial is not None
    assert trial.took_us == round(took_s * 1e6)
    assert not list(times)


def test_nothing_is_said_when_the_step_fails(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(ModelConfig(str(model)))
    runner = build_runner(loaded, CacheConfig(4, 9, num_host_blocks=0))

    def fail(_runner: ModelRunner, _step: StepInput) -> None:
        raise StepFailed("out of memory")

    monkeypatch.setattr(trial_step, "execute_step", fail)
    assert measure_step(runner, loaded, 16) is None
