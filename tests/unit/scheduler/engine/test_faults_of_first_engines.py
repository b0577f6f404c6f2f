"""Faults that the first engines showed on adversarial inputs, none of which this core has.

They are those of vLLM's V0 scheduler and block managers. Wherever possible the proof is an executor
that reads what the block tables say: every request gets the tokens of its own context, nothing is
read that was not written, and all blocks of both pools are free in the end.
"""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.values.config import PreemptionMode
from scheduler_service.scheduler.values.request import FinishReason, RequestStatus, SchedulingParams
from splitserve_rpc.domain_error import DomainError
from tests.support.core.checked_engine import swapping_engine

RECOMPUTE = PreemptionMode.RECOMPUTE
PROMPT = list(range(1, 14))


# -- lengths and refusals ----------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 3])
def test_total_length_stays_within_max_model_len_when_max_tokens_exceeds_it(depth: int) -> None:
    engine = swapping_engine(max_model_len=20, depth=depth)
    request = engine.add(PROMPT, max_tokens=100)
    engine.run()
    assert len(request.sequence.token_ids) == 20
    assert request.finish_reason is FinishReason.MODEL_LENGTH


def test_empty_prompt_stops_nobody_when_it_is_refused() -> None:
    engine = swapping_engine()
    engine.add(PROMPT, max_tokens=5)
    with pytest.raises(DomainError, match="prompt_token_ids is empty"):
        engine.add([])
    engine.add(PROMPT, max_tokens=5)
    engine.run()


def test_queue_goes_on_when_n_exceeds_max_num_seqs() -> None:
    engine = swapping_engine(max_num_seqs=2)
    with pytest.raises(DomainError, match="asks for 3 sequences; allowed: at most max_num_seqs 2"):
        engine.add(PROMPT, n=3)
    engine.add(PROMPT, n=2, max_tokens=5)
    engine.run()


# -- running out of blocks ---------------------------------------------------------------------


def test_nobody_is_preempted_when_the_slot_that_is_needed_exists() -> None:
    engine = swapping_engine(num_device_blocks=8, prefix_caching=False)
    for start in (0, 20):
        engine.add(list(range(start, start + 13)), max_tokens=4)
    engine.step()
    assert engine.core.num_free_blocks == 0
    engine.run()
    assert engine.core.num_preemptions == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [1, 3, 64])
def test_chunked_prefill_ends_when_a_prompt_fills_the_pool(budget: int, depth: int) -> None:
    engine = swapping_engine(num_device_blocks=4, max_num_batched_tokens=budget, depth=depth)
    for start in (0, 20, 40):
        engine.add(list(range(start, start + 15)), max_tokens=1)
    engine.run(max_steps=200)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_several_sequences_get_their_tokens_when_they_are_recomputed(depth: int) -> None:
    engine = swapping_engine(preemption_mode=RECOMPUTE, depth=depth)
    request = engine.add(PROMPT, n=3, max_tokens=20)
    for _ in range(4):
        engine.step(4)
        engine.preempt(request)
    engine.run()
    assert request.num_preemptions == 4


@pytest.mark.parametrize("num_host_blocks", [0, 1, 3])
def test_engine_goes_on_when_the_host_pool_is_full(num_host_blocks: int) -> None:
    engine = swapping_engine(num_device_blocks=12, num_host_blocks=num_host_blocks)
    for start in (0, 20, 40):
        engine.add(list(range(start, start + 9)), max_tokens=15, n=1 + (start == 40))
    engine.run()
    assert engine.core.num_preemptions > 0


def test_host_blocks_do_not_leak_when_a_swap_in_is_not_feasible() -> None:
    engine = swapping_engine(num_device_blocks=9, host_prefix_cache=False, prefix_caching=False)
    engine.add(PROMPT, "first", max_tokens=18)
    swapped = engine.add(PROMPT, "swapped", max_tokens=18)
    engine.step()
    engine.preempt(swapped)
    while not engine.requests[0].is_finished:
        engine.step()
        assert engine.core.num_free_host_blocks == (
            12 if swapped.status is RequestStatus.SWAPPED else 16
        )
    engine.run()


# -- prefix caching ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_answered", [True, False])
@pytest.mark.parametrize("num_sequences", [1, 2])
def test_abort_leaves_nothing_behind_when_a_swapped_request_has_cached_blocks(
    num_sequences: int, is_answered: bool
) -> None:
    engine = swapping_engine()
    doomed = engine.add(PROMPT, "doomed", n=num_sequences, max_tokens=9)
    engine.add(PROMPT, max_tokens=9)
    engine.step(2)
    engine.preempt(doomed)
    engine.engine.fill()
    if is_answered:
        engine.answer()
    assert doomed.status is RequestStatus.SWAPPED
    engine.core.abort("doomed")
    engine.requests.remove(doomed)
    engine.add(PROMPT, max_tokens=9)
    engine.run()


def test_adapters_share_no_blocks_when_their_prompts_are_the_same() -> None:
    engine = swapping_engine()
    for adapter in ("", "a", "b", "a", ""):
        engine.add(PROMPT, scheduling=SchedulingParams(adapter=adapter), max_tokens=6)
        engine.step()
    engine.run()
    assert [request.num_cached_tokens for request in engine.requests] == [0, 0, 0, 12, 12]


@pytest.mark.parametrize("ending", ["abort", "preempt"])
@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_blocks_are_no_hits_when_they_were_never_computed(num_steps: int, ending: str) -> None:
    engine = swapping_engine(preemption_mode=RECOMPUTE, max_num_batched_tokens=6)
    doomed = engine.add([*PROMPT, *PROMPT], "doomed", max_tokens=2)
    engine.step(num_steps)
    if ending == "abort":
        engine.core.abort("doomed")
        engine.requests.clear()
    elif num_steps:
        engine.preempt(doomed)
    follower = engine.add([*PROMPT, *PROMPT, 50], max_tokens=2)
    engine.run()
    most = 6 * num_steps // 4 * 4 if ending == "abort" else 24
    assert follower.num_cached_tokens <= most


def test_blocks_are_no_hits_when_they_were_evicted_and_written_anew() -> None:
    engine = swapping_engine(num_device_blocks=5, num_host_blocks=0)
    for start in (0, 20, 0, 40, 0):
        request = engine.add(list(range(start, start + 13)), max_tokens=4)
        engine.run()
        # Four of five blocks are needed: one survives.
        assert request.num_cached_tokens in (0, 4)


# -- encoders, windows -------------------------------------------------------------------------


def test_cross_attention_blocks_are_allocated_once_when_a_request_is_recomputed() -> None:
    engine = swapping_engine(preemption_mode=RECOMPUTE)
    request = engine.add(PROMPT, encoder=[11, 12, 13, 14, 15], max_tokens=12)
    for _ in range(3):
        engine.step(2)
        assert len(request.cross_blocks) == 2
        engine.preempt(request)
        assert engine.core.num_free_blocks == engine.config.num_device_blocks
    engine.run()


def test_sliding_window_runs_out_of_nothing_when_sequences_are_longer_than_the_pool() -> None:
    engine = swapping_engine(num_device_blocks=10, sliding_window=6, max_num_batched_tokens=16)
    for start in (0, 20):
        engine.add(list(range(start, start + 70)), max_tokens=70)
    engine.run()
    assert engine.core.num_preemptions == 0


@pytest.mark.parametrize("prompt_len", [5, 8, 9, 30])
def test_nothing_is_freed_twice_when_sequences_fork_inside_a_window(prompt_len: int) -> None:
    engine = swapping_engine(sliding_window=6)
    engine.add(list(range(prompt_len)), n=3, max_tokens=20)
    engine.run()
