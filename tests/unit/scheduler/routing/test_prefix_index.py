"""The index of prefixes, and the block names that it remembers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.scheduler.engine.blocks import (
    RUN_BLOCKS,
    RememberedNames,
    boundary_of,
    extend_chain,
    prefix_cache,
    root_hash,
)
from scheduler_service.scheduler.routing import CachedPrefix, PrefixIndex, prefix_index
from scheduler_service.scheduler.values import (
    Request,
    SamplingParams,
    SchedulerConfig,
    SchedulingParams,
)
from tests.support.core.driver import Tables

PROMPT = list(range(1, 14))  # Three full blocks of 4, and one token.


def add(index: PrefixIndex, number: int, tables: Tables) -> None:
    index.add(number, tables.config, tables.blocks.device, tables.blocks.host)


def request_at(tables: Tables, prompt: list[int]) -> Request:
    return tables.request(prompt)


def test_index_hashes_little_when_nobody_has_the_first_block() -> None:
    index, tables = PrefixIndex(), Tables()
    add(index, 0, tables)
    asked = request_at(tables, [7] * 4000)
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
    assert index.find(request_at(tables, PROMPT)).cached == {0: CachedPrefix(8, 0)}


def test_family_is_that_of_the_next_uncached_block() -> None:
    index, tables = PrefixIndex(), Tables()
    add(index, 0, tables)
    tables.place_published(PROMPT[:5])
    families = [
        index.find(request_at(tables, [*PROMPT[:4], *rest, 1])).family
        for rest in ([7, 7, 7, 7, 1], [7, 7, 7, 7, 2], [8, 7, 7, 7])
    ]
    assert families[0] == families[1] != families[2]
    assert 0 not in families


_BLOCK_SIZE = 2


def config_of(*, separates_tenants: bool = True) -> SchedulerConfig:
    return Tables(block_size=_BLOCK_SIZE, separates_tenants=separates_tenants).config


def request_of(prompt: list[int], **scheduling: object) -> Request:
    return Request.create(
        "r",
        prompt,
        SamplingParams(),
        arrival=0,
        seed=0,
        scheduling=SchedulingParams(**scheduling),  # type: ignore[arg-type]
    )


# Two beginnings, which part in the first run, in the second or not at all.
_BEGINNINGS = [
    np.arange(4 * RUN_BLOCKS * _BLOCK_SIZE, dtype=np.int32) % 50,
    np.arange(4 * RUN_BLOCKS * _BLOCK_SIZE, dtype=np.int32) % 50,
]
_BEGINNINGS[1][RUN_BLOCKS * _BLOCK_SIZE + 3] = 77

_asked = st.fixed_dictionaries(
    {
        "beginning": st.sampled_from([0, 1]),
        "num_tokens": st.integers(1, 4 * RUN_BLOCKS * _BLOCK_SIZE),
        "parts": st.lists(st.integers(0, 4 * RUN_BLOCKS), min_size=1, max_size=4),
        "tenant": st.sampled_from(["", "a", "1"]),
        "cache_salt": st.sampled_from(["", "s"]),
        "num_public": st.sampled_from([0, 5, RUN_BLOCKS * _BLOCK_SIZE, 150]),
        "separates_tenants": st.booleans(),
    }
)


@given(asked=st.lists(_asked, min_size=2, max_size=8))
@settings(deadline=None)
def test_names_are_those_that_hashing_gives_when_others_came_before(
    asked: list[dict[str, object]],
) -> None:
    names = RememberedNames()
    for each in asked:
        tokens = _BEGINNINGS[each["beginning"]][: each["num_tokens"]]  # type: ignore[call-overload]
        request = request_of(
            tokens.tolist(),
            tenant=each["tenant"],
            cache_salt=each["cache_salt"],
            num_public_prefix_tokens=each["num_public"],
        )
        config = config_of(separates_tenants=bool(each["separates_tenants"]))
        chain: list[bytes] = []
        expected, boundary = [root_hash(config, request)], boundary_of(config, request)
        for num_blocks in each["parts"]:  # type: ignore[attr-defined]
            some = min(num_blocks, len(tokens) // _BLOCK_SIZE)
            names.grow_chain(chain, config, request, tokens, some)
            extend_chain(expected, tokens, some, _BLOCK_SIZE, boundary)
            assert chain == expected


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What is hashed, block by block."""
    hashed: list[bytes] = []
    hash_block = prefix_cache.hash_block

    def noted(parent: bytes, token_data: bytes) -> bytes:
        hashed.append(token_data)
        return hash_block(parent, token_data)

    monkeypatch.setattr(prefix_cache, "hash_block", noted)
    return hashed


def test_names_are_hashed_once_when_prompts_begin_alike(hashed: list[bytes]) -> None:
    names, config, num_blocks = RememberedNames(), config_of(), 2 * RUN_BLOCKS + 3
    for last in (1, 2):
        prompt = [5] * (num_blocks - 1) * _BLOCK_SIZE + [last] * _BLOCK_SIZE
        request = request_of(prompt)
        names.grow_chain([], config, request, request.sequence.token_ids, num_blocks)
    assert len(hashed) == num_blocks + 3


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"tenant": "a"}, {"tenant": "b"}),
        ({"tenant": "a", "cache_salt": "s"}, {"tenant": "a", "cache_salt": "t"}),
        # Its name of these blocks is the same.
        (
            {"tenant": "a", "num_public_prefix_tokens": RUN_BLOCKS * _BLOCK_SIZE},
            {"tenant": "b", "num_public_prefix_tokens": RUN_BLOCKS * _BLOCK_SIZE},
        ),
    ],
)
def test_remembered_names_are_not_shared_between_contexts(
    hashed: list[bytes], first: dict[str, object], second: dict[str, object]
) -> None:
    names, config, num_blocks = RememberedNames(), config_of(), 2 * RUN_BLOCKS
    for scheduling in (first, second):
        request = request_of([5] * num_blocks * _BLOCK_SIZE, **scheduling)
        names.grow_chain([], config, request, request.sequence.token_ids, num_blocks)
    assert len(hashed) == 2 * num_blocks


def test_names_unused_for_long_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_cache, "MAX_RUNS", 2)
    names, config = RememberedNames(), config_of()
    for token in (1, 2, 1, 3, 4):
        request = request_of([token] * RUN_BLOCKS * _BLOCK_SIZE)
        names.grow_chain([], config, request, request.sequence.token_ids, RUN_BLOCKS)
        assert names.num_runs <= 2
