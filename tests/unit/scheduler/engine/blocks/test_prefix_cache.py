"""Prefix caching: names of blocks, which are found and published, and what is shared."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

import pytest

from scheduler_service.scheduler.engine.blocks import (
    NO_HIT,
    RUN_BLOCKS,
    PrefixHit,
    extend_chain,
    prefix_cache,
    root_hash,
)
from scheduler_service.scheduler.values import (
    Request,
    SamplingParams,
    SchedulingParams,
    Sequence,
    token_array,
)
from tests.support.core.driver import CoreDriver, Tables, make_config
from tests.support.core.in_process import CheckedEngine


def root_of(
    model: str = "m",
    tenant: str = "t",
    adapter: str = "a",
    salt: str = "s",
    encoder: Items[int] | None = (1, 2),
    *,
    separates_tenants: bool = True,
) -> bytes:
    config = make_config(model_digest=model, separates_tenants=separates_tenants)
    request = Request.create(
        "r",
        [1],
        SamplingParams(),
        arrival=1,
        seed=0,
        scheduling=SchedulingParams(tenant=tenant, adapter=adapter, cache_salt=salt),
        encoder_token_ids=encoder,
    )
    return root_hash(config, request)


def chain_of(tokens: list[int], block_size: int = 2, start: bytes = b"root") -> list[bytes]:
    hashes = [start]
    extend_chain(hashes, token_array(tokens), len(tokens) // block_size, block_size)
    return hashes


def test_root_hash_is_the_same_when_the_context_is() -> None:
    assert root_of() == root_of()


@pytest.mark.parametrize(
    "change",
    [{"model": "n"}, {"tenant": "u"}, {"adapter": "b"}, {"salt": "t"}, {"encoder": [1, 3]}],
)
def test_root_hash_differs_when_one_field_does(change: dict[str, str]) -> None:
    assert root_of(**change) != root_of()  # type: ignore[arg-type]


def test_root_hash_is_the_same_for_tenants_when_they_share() -> None:
    assert root_of(tenant="a", separates_tenants=False) == root_of(
        tenant="b", separates_tenants=False
    )


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"model": "ab", "tenant": "c"}, {"model": "a", "tenant": "bc"}),
        ({"tenant": "ab", "adapter": "c"}, {"tenant": "a", "adapter": "bc"}),
        ({"tenant": "", "adapter": "x"}, {"tenant": "x", "adapter": ""}),
        ({"adapter": "ab", "salt": "c"}, {"adapter": "a", "salt": "bc"}),
        ({"adapter": "", "salt": "x"}, {"adapter": "x", "salt": ""}),
        ({"salt": "\x01\0\0\0", "encoder": None}, {"salt": "", "encoder": [1]}),
    ],
)
def test_root_hash_differs_when_text_moves_to_the_next_field(
    left: dict[str, str], right: dict[str, str]
) -> None:
    assert root_of(**left) != root_of(**right)  # type: ignore[arg-type]


def test_root_hash_differs_when_one_field_looks_like_two() -> None:
    # One field that contains what would separate it from the next.
    separator = (1).to_bytes(8, "little").decode("latin-1")
    assert root_of(adapter=f"a{separator}s", salt="") != root_of(adapter="a", salt="s")


def test_extend_chain_gives_another_name_when_a_token_differs() -> None:
    assert chain_of([1, 2])[1] != chain_of([1, 3])[1]


def test_extend_chain_gives_another_name_when_only_the_parent_differs() -> None:
    assert chain_of([1, 2, 5, 6])[2] != chain_of([3, 4, 5, 6])[2]
    assert chain_of([1, 2], start=b"x")[1] != chain_of([1, 2], start=b"y")[1]


def test_extend_chain_tells_tokens_apart_when_their_low_bytes_agree() -> None:
    assert chain_of([1, 2])[1] != chain_of([257, 2])[1]


PROMPT = list(range(1, 14))  # Three full blocks of 4, and one token.


def find(tables: Tables, prompt: list[int], **scheduling: object) -> PrefixHit:
    wanted = SchedulingParams(**scheduling)  # type: ignore[arg-type]
    return tables.blocks.prefixes.find(tables.request(prompt, scheduling=wanted).sequence)


# One token at least is left to be computed.
@pytest.mark.parametrize(
    ("prompt", "num_blocks"),
    [
        (PROMPT, 3),
        ([*PROMPT[:4], 50, *PROMPT[5:]], 1),
        (PROMPT[:12], 2),
        (PROMPT[:9], 2),
        (PROMPT[:4], 0),
    ],
)
def test_find_returns_full_blocks_of_the_common_prefix(prompt: list[int], num_blocks: int) -> None:
    tables = Tables()
    _, table = tables.place_published(PROMPT)
    assert find(tables, prompt) == PrefixHit(4 * num_blocks, 0, tuple(table[:num_blocks]))


def test_find_hashes_a_long_common_prefix_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_hashed = 0
    hash_block = prefix_cache.hash_block

    def noted(parent: bytes, token_data: bytes) -> bytes:
        nonlocal num_hashed
        num_hashed += 1
        return hash_block(parent, token_data)

    monkeypatch.setattr(prefix_cache, "hash_block", noted)
    tables = Tables()
    for last in (1, 2):
        find(tables, [5] * 4 * RUN_BLOCKS + [last] * 5)
    assert num_hashed == RUN_BLOCKS + 2


def test_publish_names_only_new_blocks_when_others_hold_the_same() -> None:
    tables = Tables()
    tables.place_published(PROMPT)
    twin = tables.sequence([*PROMPT[:8], 60, 61, 62, 63])
    table = tables.place(twin)
    published = tables.blocks.prefixes.publish(twin, twin.token_ids, table, 0)
    assert published == [table[2]]


def test_publish_leaves_out_blocks_when_they_were_released() -> None:
    tables = Tables()
    sequence = tables.sequence(PROMPT)
    table = tables.place(sequence)
    published = tables.blocks.prefixes.publish(sequence, sequence.token_ids, [-1, *table[1:3]], 0)
    assert published == table[1:3]


def test_publish_names_a_block_by_its_position() -> None:
    tables = Tables()
    sequence = tables.sequence(PROMPT)
    table = tables.place(sequence)
    prefixes = tables.blocks.prefixes
    prefixes.publish(sequence, sequence.token_ids, table[1:2], 1)
    assert find(tables, PROMPT) == NO_HIT
    prefixes.publish(sequence, sequence.token_ids, table[:1], 0)
    assert find(tables, PROMPT).num_tokens == 8


@pytest.mark.parametrize(("num_sent", "num_found"), [(0, 0), (11, 0), (12, 12)])
def test_find_returns_nothing_when_prompt_logprobs_are_still_to_come(
    num_sent: int, num_found: int
) -> None:
    tables = Tables()
    tables.place_published(PROMPT)
    request = tables.request(PROMPT, num_prompt_logprobs=0)
    request.num_prompt_logprobs_sent = num_sent
    assert tables.blocks.prefixes.find(request.sequence).num_tokens == num_found


# -- the host pool as a second tier ------------------------------------------------------------


def evict_all(tables: Tables, published: Sequence) -> None:
    """Lets other contents take every device block."""
    tables.leave(published)
    blocks = tables.blocks.device.allocate(tables.blocks.device.num_free)
    tables.blocks.take_draft()
    tables.blocks.device.free(blocks)


def test_find_prefers_the_device_when_both_pools_have_a_block() -> None:
    tables = Tables(num_device_blocks=4, num_host_blocks=8)
    sequence, _ = tables.place_published(PROMPT)
    evict_all(tables, sequence)
    _, table = tables.place_published(PROMPT[:4])
    hit = find(tables, PROMPT)
    assert (hit.device_blocks, len(hit.host_blocks)) == (table[:1], 2)


# -- sliding windows ---------------------------------------------------------------------------


def test_find_needs_only_the_window_before_the_next_token() -> None:
    tables = Tables(sliding_window=5)
    sequence = tables.sequence(PROMPT)
    table = tables.place(sequence) + tables.blocks.extend(sequence.row_id, 1)
    tables.blocks.prefixes.publish(sequence, sequence.token_ids, table[:3], 0)
    tables.blocks.device.unpublish(table[0])
    tables.blocks.device.unpublish(table[1])
    # Token 12 attends to positions 8 to 12, token 8 to 4 to 8.
    assert find(tables, PROMPT) == PrefixHit(12, 2, tuple(table[2:3]))
    assert find(tables, PROMPT[:12]) == NO_HIT


def test_find_looks_further_back_when_the_last_window_is_incomplete() -> None:
    tables = Tables(sliding_window=9)
    sequence = tables.sequence(PROMPT)
    table = tables.place(sequence)
    tables.blocks.prefixes.publish(sequence, sequence.token_ids, table[:3], 0)
    tables.blocks.device.unpublish(table[2])
    assert find(tables, PROMPT) == PrefixHit(8, 0, tuple(table[:2]))


@pytest.mark.parametrize(
    ("window", "num_computed", "first"),
    [(None, 100, 0), (4, 3, 0), (4, 6, 0), (4, 7, 1), (1, 7, 1), (1, 8, 2), (5, 8, 1), (5, 7, 0)],
)
def test_first_block_needed_holds_the_oldest_token_of_the_window(
    window: int | None, num_computed: int, first: int
) -> None:
    prefixes = Tables(sliding_window=window).blocks.prefixes
    assert prefixes.first_block_needed(num_computed) == first


BLOCK_SIZE = 4
PUBLIC_PROMPT = list(range(1, 18))  # Four full blocks, and one token.


def num_found(
    first: SchedulingParams,
    second: SchedulingParams,
    *,
    encoder: list[int] | None = None,
    **config: object,
) -> int:
    """Returns how many tokens the second request finds of what the first has published."""
    tables = Tables(**config)
    publisher = tables.request(PUBLIC_PROMPT, scheduling=first, encoder=encoder).sequence
    table = tables.place(publisher)
    prefixes = tables.blocks.prefixes
    prefixes.publish(publisher, publisher.token_ids, table[: len(PUBLIC_PROMPT) // BLOCK_SIZE], 0)
    finder = tables.request(PUBLIC_PROMPT, scheduling=second, encoder=encoder).sequence
    return prefixes.find(finder).num_tokens


def public(tenant: str, num_tokens: int) -> SchedulingParams:
    return SchedulingParams(tenant=tenant, num_public_prefix_tokens=num_tokens)


def test_find_returns_nothing_when_the_encoder_has_private_input() -> None:
    assert num_found(public("a", 16), public("b", 16), encoder=[5, 6]) == 0
    assert num_found(public("a", 16), public("a", 16), encoder=[5, 6]) == 16


def test_find_returns_all_when_tenants_share_anyway() -> None:
    assert num_found(public("a", 8), public("b", 0), separates_tenants=False) == 16


def test_find_returns_nothing_when_the_cache_is_bypassed() -> None:
    of_a, of_b = public("a", 16), public("b", 16)
    assert num_found(of_a, replace(of_b, uses_prefix_cache=False)) == 0
    assert num_found(replace(of_a, uses_prefix_cache=False), of_b) == 0


COMMON = list(range(1, 33))


def num_tokens_until_idle(engine: CheckedEngine) -> int:
    """Runs to the end; returns how many input tokens all steps had."""
    count = 0
    while True:
        before = engine.core.last_step_id
        engine.engine.fill()
        plans = [plan for plan, _ in engine.engine.in_flight]
        count += sum(plan.num_tokens for plan in plans if plan.step_id > before)
        if not engine.engine.in_flight:
            assert engine.runner.violations == []
            engine.check()
            return count
        engine.answer()


# -- within a step -----------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_prompts_compute_their_common_prefix_once_when_they_arrive_together(depth: int) -> None:
    engine = CheckedEngine(
        depth=depth,
        max_num_seqs=32,
        max_num_waiting=32,
        max_num_batched_tokens=512,
        num_device_blocks=256,
    )
    for number in range(32):
        engine.add([*COMMON, 100 + number, 200 + number], max_tokens=1)
    assert num_tokens_until_idle(engine) == 32 + 32 * 2
    assert [r.num_cached_tokens for r in engine.requests] == [0] + [32] * 31


def test_prompt_finds_a_chunk_that_the_same_step_computes() -> None:
    driver = CoreDriver(max_num_batched_tokens=24)
    driver.add(COMMON, "first")
    assert driver.next_rows() == [("first", 0, 24)]
    driver.answer()
    driver.add([*COMMON[:28], 90], "second")
    assert driver.next_rows() == [("first", 24, 8), ("second", 28, 1)]


def test_block_is_findable_when_the_last_prompt_token_fills_it() -> None:
    driver = CoreDriver(max_num_batched_tokens=3)
    driver.add(4, max_tokens=1)
    driver.run()
    assert driver.core.num_cached_blocks == 1


def test_prompts_share_nothing_when_one_opts_out() -> None:
    driver = CoreDriver()
    private = SchedulingParams(uses_prefix_cache=False)
    driver.add(13, "private", scheduling=private)
    driver.add(13, "first")
    driver.add(13, "second")
    driver.add(13, "private too", scheduling=private)
    assert driver.next_rows() == [
        ("private", 0, 13),
        ("first", 0, 13),
        ("second", 12, 1),
        ("private too", 0, 13),
    ]


def test_urgent_request_preempts_nobody_whose_pending_blocks_it_shares() -> None:
    engine = CheckedEngine(num_device_blocks=7, queue_policy="priority", max_num_batched_tokens=17)
    engine.add([90], max_tokens=3, scheduling=SchedulingParams(priority=-5))
    patient = engine.add(COMMON[:24], max_tokens=4, scheduling=SchedulingParams(priority=5))
    engine.step()
    # The patient one computes its last two blocks in the next step; the urgent one would share
    # all six, and lacks a seventh.
    engine.add([*COMMON[:24], 60], max_tokens=3)
    engine.step()
    assert patient.num_preemptions == 0
    engine.run()
    assert patient.num_preemptions == 1


# -- from request to request -------------------------------------------------------------------


def test_answer_is_not_findable_when_its_request_opts_out() -> None:
    driver = CoreDriver()
    driver.add(3, scheduling=SchedulingParams(uses_prefix_cache=False), max_tokens=9)
    driver.run()
    assert driver.core.num_cached_blocks == 0


def test_conversation_goes_on_from_its_answer_when_it_was_several() -> None:
    engine = CheckedEngine(depth=2)
    engine.add(COMMON[:10], max_tokens=12, n=2)
    engine.run()
    for answer in engine.engine.delivered["r1"]:
        follower = engine.add([*COMMON[:10], *answer], max_tokens=3)
        engine.run()
        assert follower.num_cached_tokens == 20


def test_num_cached_tokens_counts_only_the_prompt_when_resumed() -> None:
    driver = CoreDriver()
    driver.add(20, max_tokens=1)
    driver.run()
    request = driver.add(5, resume=[[1 + p for p in range(5, 20)]])
    driver.step()
    assert request.num_cached_tokens == 5


# -- the host pool gives evicted blocks a second chance ----------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("num_host_blocks", "num_cached"), [(16, 24), (0, 0), (3, 0)])
def test_evicted_prefix_comes_back_when_the_host_pool_kept_it(
    num_host_blocks: int, num_cached: int, depth: int
) -> None:
    engine = CheckedEngine(num_device_blocks=10, num_host_blocks=num_host_blocks, depth=depth)
    engine.add(COMMON[:25], max_tokens=3)
    engine.run()
    for start in (100, 200):
        engine.add(list(range(start, start + 36)), max_tokens=3)
        engine.run()
    again = engine.add(COMMON[:25], max_tokens=3)
    engine.run()
    assert again.num_cached_tokens == num_cached
