"""Steps before serving: which there are, and that a real runner takes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.runner.kernel_warm_up import compile_kernels, full_step_sizes, step_sizes
from executor_service.runner.pool_sizes import CacheConfig, build_runner
from tests.support.models.tiny_models import make_tiny_model


def _tile(num_queries: int) -> int:
    """Queries of a tile: a power of two, 16 to 128."""
    return min(128, max(16, 1 << (num_queries - 1).bit_length()))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16])
def test_steps_have_tiles_of_all_sizes_that_prompts_can_have(group: int) -> None:
    sizes = list(step_sizes(8192, 256))
    tried = {_tile(group * max(new)) for new in sizes if max(new) > 1}
    assert tried == {_tile(group * longest) for longest in range(2, 2000)}


def test_steps_are_decodes_and_prompts_and_both() -> None:
    sizes = list(step_sizes(8192, 256))
    assert {len(new) for new in sizes if max(new) == 1} >= {1, 2, 16}
    assert [2] in sizes
    assert any(min(new) == 1 < max(new) for new in sizes)


def test_full_steps_have_prompts_of_all_lengths_and_as_many_as_fit() -> None:
    small = {max(new) for new in step_sizes(8192, 256) if max(new) > 1}
    full = list(full_step_sizes(8192, 256))
    assert {max(new) for new in full} == small
    assert all(len(new) == min(256, 8192 // new[0]) for new in full)


@pytest.mark.parametrize(("most_tokens", "most_rows"), [(1, 1), (4, 2), (9, 3), (40, 300)])
def test_steps_stay_within_limits(most_tokens: int, most_rows: int) -> None:
    sizes = [*step_sizes(most_tokens, most_rows), *full_step_sizes(most_tokens, most_rows)]
    assert [1] in sizes
    assert max(sum(new) for new in sizes) <= most_tokens
    assert max(len(new) for new in sizes) <= most_rows


@pytest.mark.parametrize(("num_blocks", "max_model_len"), [(1, 3), (9, 24)])
def test_runner_takes_all_steps_when_there_is_little_room(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    num_blocks: int,
    max_model_len: int,
) -> None:
    make_tiny_model("llama", tmp_path, overrides={"num_hidden_layers": 1})
    loaded = load_model(ModelConfig(str(tmp_path), max_model_len=max_model_len))
    config = CacheConfig(4, num_device_blocks=num_blocks, num_host_blocks=0)
    runner = build_runner(loaded, config)
    with caplog.at_level("INFO"):
        compile_kernels(runner, loaded, 3, 16)
    assert "kernels_compiled num_steps=" in caplog.text
    assert not [r for r in caplog.records if r.levelname == "ERROR"]
