"""The index of prefixes, by hand."""

from __future__ import annotations

import pytest

from scheduler_service.scheduler.routing import prefix_index
from scheduler_service.scheduler.routing.prefix_index import CachedPrefix, PrefixIndex
from scheduler_service.scheduler.values.request import Request
from tests.support.core.parts import Tables

PROMPT = list(range(1, 14))  # Three full blocks of 4, and one token.


def add(index: PrefixIndex, number: int, tables: Tables) -> None:
    index.add(number, tables.config, tables.blocks.device, tables.blocks.host)


def request(tables: Tables, prompt: list[int]) -> Request:
    return tables.request(prompt)


def test_index_finds_nothing_when_it_knows_nobody() -> None:
    assert PrefixIndex().find(request(Tables(), PROMPT)).cached == {}


def test_index_finds_what_was_published_before_when_an_executor_is_added() -> None:
    index, tables = PrefixIndex(), Tables()
    tables.place_published(PROMPT)
    add(index, 3, tables)
    assert index.find(request(tables, PROMPT)).cached == {3: CachedPrefix(12, 0)}


def test_index_tells_executors_apart_when_they_hold_different_parts() -> None:
    index, short, long, empty = PrefixIndex(), Tables(), Tables(), Tables()
    for number, tables in enumerate((short, long, empty)):
        add(index, number, tables)
    short.place_published([*PROMPT[:4], 50])
    long.place_published(PROMPT)
    cached = index.find(request(empty, PROMPT)).cached
    assert cached == {0: CachedPrefix(4, 0), 1: CachedPrefix(12, 0)}


def test_index_finds_each_by_its_own_names_when_block_sizes_differ() -> None:
    index, small, large = PrefixIndex(), Tables(block_size=4), Tables(block_size=6)
    add(index, 1, small)
    add(index, 2, large)
    small.place_published(PROMPT)
    large.place_published(PROMPT)
    cached = index.find(request(small, PROMPT)).cached
    assert cached == {1: CachedPrefix(12, 0), 2: CachedPrefix(12, 0)}


def test_index_forgets_all_of_an_executor_when_it_is_removed() -> None:
    index, gone, stays = PrefixIndex(), Tables(), Tables()
    add(index, 0, gone)
    add(index, 1, stays)
    gone.place_published(PROMPT)
    index.remove(0)
    assert index.num_hashes == 0
    gone.place_published([*range(40, 60)])
    assert index.num_hashes == 0

    add(index, 2, Tables())
    stays.place_published(PROMPT)
    assert index.find(request(stays, PROMPT)).cached == {1: CachedPrefix(12, 0)}


def test_index_hashes_little_when_nobody_has_the_first_block() -> None:
    index, tables = PrefixIndex(), Tables()
    add(index, 0, tables)
    asked = request(tables, [7] * 4000)
    index.find(asked)
    (chain,) = asked.sequence.chains.values()
    assert len(chain) < 50


def test_index_looks_no_further_when_a_prompt_is_very_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index, tables = PrefixIndex(), Tables()
    add(index, 0, tables)
    tables.place_published(PROMPT)
    monkeypatch.setattr(prefix_index, "MAX_BLOCKS", 2)
    assert index.find(request(tables, PROMPT)).cached == {0: CachedPrefix(8, 0)}


def test_family_is_the_same_when_prompts_go_on_alike_behind_what_is_cached() -> None:
    index, tables = PrefixIndex(), Tables()
    add(index, 0, tables)
    tables.place_published(PROMPT[:5])
    families = [
        index.find(request(tables, [*PROMPT[:4], *rest, 1])).family
        for rest in ([7, 7, 7, 7, 1], [7, 7, 7, 7, 2], [8, 7, 7, 7])
    ]
    assert families[0] == families[1] != families[2]
    assert 0 not in families
