"""Swap or recompute: what is measured, and what is chosen."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.engine.preemption_costs import (
    ASSUMED_HOST_LINK_BYTES_PER_S,
    PreemptionCosts,
)
from scheduler_service.scheduler.values.config import PreemptionMode
from tests.support.core.driver import make_config


def make_costs(
    mode: PreemptionMode = PreemptionMode.AUTO, *, block_bytes: int = 0
) -> PreemptionCosts:
    return PreemptionCosts(make_config(preemption_mode=mode, block_bytes=block_bytes))


def observe_prefill(costs: PreemptionCosts, us_per_token: int) -> None:
    costs.observe(num_moves=0, move_us=0, num_rows=1, num_tokens=100, compute_us=100 * us_per_token)


def observe_moves(costs: PreemptionCosts, us_per_block: int) -> None:
    costs.observe(num_moves=4, move_us=4 * us_per_block, num_rows=1, num_tokens=1, compute_us=0)


def prefers_swap(costs: PreemptionCosts, num_blocks: int = 10, num_tokens: int = 40) -> bool:
    return costs.prefers_swap(num_blocks=num_blocks, num_tokens=num_tokens, num_sequences=1)


@pytest.mark.parametrize(
    ("mode", "swaps"), [(PreemptionMode.SWAP, True), (PreemptionMode.RECOMPUTE, False)]
)
def test_prefers_swap_obeys_when_the_mode_is_pinned(mode: PreemptionMode, swaps: bool) -> None:
    costs = make_costs(mode)
    observe_prefill(costs, us_per_token=1 if swaps else 1000)
    observe_moves(costs, us_per_block=1000 if swaps else 1)
    assert prefers_swap(costs) is swaps


@pytest.mark.parametrize(("num_sequences", "swaps"), [(1, False), (2, True)])
def test_prefers_swap_goes_by_the_number_of_sequences_when_nothing_is_measured(
    num_sequences: int, swaps: bool
) -> None:
    costs = make_costs()
    preference = costs.prefers_swap(num_blocks=1, num_tokens=9, num_sequences=num_sequences)
    assert preference is swaps


@pytest.mark.parametrize(("us_per_block", "swaps"), [(19, True), (20, False), (21, False)])
def test_prefers_swap_compares_two_moves_of_each_block_with_computing_when_both_are_measured(
    us_per_block: int, swaps: bool
) -> None:
    costs = make_costs()
    observe_prefill(costs, us_per_token=10)
    observe_moves(costs, us_per_block=us_per_block)
    # 2 x 10 blocks against 40 tokens of 10 us.
    assert prefers_swap(costs) is swaps


def test_prefers_swap_assumes_a_link_when_only_computing_was_measured() -> None:
    costs = make_costs(block_bytes=int(ASSUMED_HOST_LINK_BYTES_PER_S / 1e6) * 19)
    observe_prefill(costs, us_per_token=10)
    assert prefers_swap(costs)
    assert not prefers_swap(costs, num_tokens=37)


def test_prefers_swap_follows_the_newest_when_measurements_change() -> None:
    costs = make_costs()
    observe_prefill(costs, us_per_token=10)
    observe_moves(costs, us_per_block=5)
    for _ in range(40):
        observe_moves(costs, us_per_block=500)
    assert not prefers_swap(costs)


def test_observe_learns_nothing_of_prefills_when_a_step_only_decodes() -> None:
    costs = make_costs()
    observe_moves(costs, us_per_block=1)
    costs.observe(num_moves=0, move_us=0, num_rows=64, num_tokens=64, compute_us=9000)
    assert costs.prefill_us == 0
    assert not prefers_swap(costs)


def test_observe_keeps_how_long_the_last_prefill_took_when_decodes_follow() -> None:
    costs = make_costs()
    observe_prefill(costs, us_per_token=3)
    costs.observe(num_moves=0, move_us=0, num_rows=8, num_tokens=8, compute_us=50)
    assert costs.prefill_us == 300


def test_observe_learns_nothing_when_the_executor_reports_no_times() -> None:
    costs = make_costs()
    costs.observe(num_moves=3, move_us=0, num_rows=1, num_tokens=500, compute_us=0)
    assert costs.prefill_us == 0
