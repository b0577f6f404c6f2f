"""The configuration of a core: what is refused, and how long a sequence may become."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.scheduler import Scheduler
from scheduler_service.scheduler.values.config import FleetConfig
from tests.support.core.driver import make_config


@pytest.mark.parametrize(
    ("field", "value", "least"),
    [
        ("block_size", 0, 1),
        ("num_device_blocks", 0, 1),
        ("max_num_seqs", 0, 1),
        ("max_num_batched_tokens", 0, 1),
        ("max_model_len", 1, 2),
        ("max_num_waiting", 0, 1),
        ("vocab_size", 0, 1),
        ("num_host_blocks", -1, 0),
        ("block_bytes", -1, 0),
        ("sliding_window", 0, 1),
        ("max_adapters", -1, 0),
        ("num_lookahead_slots", -1, 0),
        ("delay_factor", -0.5, 0.0),
    ],
)
def test_config_names_field_value_and_least_when_out_of_range(
    field: str, value: float, least: float
) -> None:
    with pytest.raises(ValueError, match=rf"{field} is {value}; allowed: {least} or more"):
        make_config(**{field: value})


def test_scheduler_refuses_when_the_queue_policy_is_unknown() -> None:
    with pytest.raises(ValueError, match="queue_policy is 'lifo'; allowed: fcfs"):
        Scheduler(FleetConfig(queue_policy="lifo"))


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_scheduler_refuses_when_a_weight_is_not_positive(weight: float) -> None:
    with pytest.raises(ValueError, match=r"tenant_weights\['a'\]"):
        Scheduler(FleetConfig(queue_policy="fair", tenant_weights={"a": weight}))


@pytest.mark.parametrize(("max_model_len", "num_blocks", "length"), [(30, 8, 30), (40, 8, 32)])
def test_max_len_is_the_tighter_limit_when_model_and_pool_differ(
    max_model_len: int, num_blocks: int, length: int
) -> None:
    config = make_config(max_model_len=max_model_len, num_device_blocks=num_blocks, block_size=4)
    assert config.max_len == length


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_sequences", "length"),
    # Of 10 blocks, what is full of prompt is shared; the others have the rest to themselves.
    [(9, 1, 40), (9, 2, 24), (8, 2, 20), (1, 2, 20), (9, 3, 16), (9, 11, 8)],
)
def test_max_len_for_shares_the_full_blocks_of_the_prompt_when_there_are_several(
    num_prompt_tokens: int, num_sequences: int, length: int
) -> None:
    config = make_config(num_device_blocks=10, block_size=4)
    assert config.max_len_for(num_prompt_tokens, num_sequences, 0) == length


def test_max_len_for_leaves_the_blocks_of_the_encoder_when_there_is_one() -> None:
    assert make_config(num_device_blocks=10, block_size=4).max_len_for(1, 1, 3) == 28


@pytest.mark.parametrize(("num_sequences", "length"), [(1, 200), (2, 200), (3, 12)])
def test_max_len_for_is_that_of_the_model_when_the_windows_fit(
    num_sequences: int, length: int
) -> None:
    config = make_config(num_device_blocks=10, block_size=4, sliding_window=9)
    assert config.max_len_for(1, num_sequences, 0) == length
