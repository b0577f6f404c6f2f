"""The prefix cache alone: which blocks are found, and which are made findable."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.engine.blocks.prefix_cache import NO_HIT, PrefixHit
from scheduler_service.scheduler.values.request import SchedulingParams, Sequence
from tests.support.core.parts import Tables

PROMPT = list(range(1, 14))  # Three full blocks of 4, and one token.


def find(tables: Tables, prompt: list[int], **scheduling: object) -> PrefixHit:
    wanted = SchedulingParams(**scheduling)  # type: ignore[arg-type]
    return tables.blocks.prefixes.find(tables.request(prompt, scheduling=wanted).sequence)


def test_find_returns_nothing_when_nothing_was_published() -> None:
    assert find(Tables(), PROMPT) == NO_HIT


def test_find_returns_all_full_blocks_when_the_prompt_is_the_same() -> None:
    tables = Tables()
    _, table = tables.place_published(PROMPT)
    assert find(tables, PROMPT) == PrefixHit(12, 0, tuple(table[:3]))


def test_find_stops_at_the_first_block_that_differs_when_a_later_one_agrees() -> None:
    tables = Tables()
    _, table = tables.place_published(PROMPT)
    other = [*PROMPT[:4], 50, *PROMPT[5:]]
    assert find(tables, other) == PrefixHit(4, 0, tuple(table[:1]))


def test_find_stops_at_a_gap_when_a_block_in_the_middle_is_gone() -> None:
    tables = Tables()
    _, table = tables.place_published(PROMPT)
    tables.blocks.device.unpublish(table[1])
    assert find(tables, PROMPT).num_tokens == 4


@pytest.mark.parametrize(("num_tokens", "num_found"), [(12, 8), (13, 12), (9, 8), (8, 4), (4, 0)])
def test_find_leaves_a_token_to_be_computed_when_the_prompt_ends_with_a_block(
    num_tokens: int, num_found: int
) -> None:
    tables = Tables()
    tables.place_published(PROMPT)
    assert find(tables, PROMPT[:num_tokens]).num_tokens == num_found


@pytest.mark.parametrize("scheduling", [{"cache_salt": "s"}, {"adapter": "a"}, {"tenant": "t"}])
def test_find_returns_nothing_when_the_context_is_another(scheduling: dict[str, str]) -> None:
    tables = Tables()
    tables.place_published(PROMPT)
    assert find(tables, PROMPT, **scheduling) == NO_HIT


def test_find_returns_blocks_of_another_tenant_when_tenants_share() -> None:
    tables = Tables(separates_tenants=False)
    tables.place_published(PROMPT)
    assert find(tables, PROMPT, tenant="t").num_tokens == 12


def test_find_returns_nothing_when_the_encoder_tokens_are_others() -> None:
    tables = Tables()
    tables.place_published(PROMPT)
    translated = tables.request(PROMPT, encoder=[7]).sequence
    assert tables.blocks.prefixes.find(translated) == NO_HIT


def test_find_returns_nothing_when_the_request_opts_out() -> None:
    tables = Tables()
    tables.place_published(PROMPT)
    assert find(tables, PROMPT, uses_prefix_cache=False) == NO_HIT


def test_publish_publishes_nothing_when_the_request_opts_out() -> None:
    tables = Tables()
    private = SchedulingParams(uses_prefix_cache=False)
    sequence = tables.request(PROMPT, scheduling=private).sequence
    table = tables.place(sequence)
    assert tables.blocks.prefixes.publish(sequence, sequence.token_ids, table[:3], 0) == []
    assert find(tables, PROMPT) == NO_HIT


def test_publish_publishes_nothing_when_caching_is_off() -> None:
    tables = Tables(prefix_caching=False)
    tables.place_published(PROMPT)
    assert tables.blocks.device.num_published == 0


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


def test_publish_names_a_block_by_its_place_when_it_begins_in_the_middle() -> None:
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


def test_find_returns_host_blocks_when_the_device_has_forgotten_them() -> None:
    tables = Tables(num_device_blocks=4, num_host_blocks=8)
    sequence, _ = tables.place_published(PROMPT)
    evict_all(tables, sequence)
    hit = find(tables, PROMPT)
    assert hit.num_tokens == 12
    assert len(hit.host_blocks) == 3


def test_find_prefers_the_device_when_both_pools_have_a_block() -> None:
    tables = Tables(num_device_blocks=4, num_host_blocks=8)
    sequence, _ = tables.place_published(PROMPT)
    evict_all(tables, sequence)
    _, table = tables.place_published(PROMPT[:4])
    hit = find(tables, PROMPT)
    assert (hit.device_blocks, len(hit.host_blocks)) == (table[:1], 2)


def test_find_returns_nothing_when_the_host_tier_is_off() -> None:
    tables = Tables(num_device_blocks=4, num_host_blocks=8, host_prefix_cache=False)
    sequence, _ = tables.place_published(PROMPT)
    evict_all(tables, sequence)
    assert find(tables, PROMPT) == NO_HIT


# -- sliding windows ---------------------------------------------------------------------------


def test_find_needs_only_the_window_when_what_is_behind_it_is_gone() -> None:
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
def test_first_block_needed_holds_the_oldest_token_when_there_is_a_window(
    window: int | None, num_computed: int, first: int
) -> None:
    prefixes = Tables(sliding_window=window).blocks.prefixes
    assert prefixes.first_block_needed(num_computed) == first
