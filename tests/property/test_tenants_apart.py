"""What a tenant can tell of another: nothing but what both of them say is public.

Two worlds are compared that differ in what a tenant says, and in nothing else; what another tenant
sees of them must be the same. That is: which of its tokens are cached, and which steps compute the
others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.scheduler.queue import QUEUE_POLICIES
from scheduler_service.scheduler.values import Feature, Request, SchedulingParams
from tests.support.core.driver import CoreDriver

NUM_EXAMPLES = int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "60"))
property_settings = settings(max_examples=NUM_EXAMPLES, deadline=None)

_SAMPLED = 7
_LETTERS = (1, 2)
_MAX_FOLLOWED = 20
_VICTIM, _WATCHER = "victim", "watcher"


@dataclass(frozen=True)
class _Ask:
    """A request: of whom, with which prompt, and after how many more steps it comes."""

    tenant: str
    prompt: tuple[int, ...]
    max_tokens: int = 1
    num_public: int = 0
    salt: str = ""
    adapter: str = ""
    num_steps_before: int = 0

    @property
    def scheduling(self) -> SchedulingParams:
        return SchedulingParams(
            tenant=self.tenant,
            cache_salt=self.salt,
            adapter=self.adapter,
            num_public_prefix_tokens=self.num_public,
        )


def _asks(tenants: Sequence[str], *, num_public: st.SearchStrategy[int]) -> st.SearchStrategy[_Ask]:
    """Requests that have a lot in common."""
    return st.builds(
        _Ask,
        st.sampled_from(tenants),
        st.lists(st.sampled_from(_LETTERS), min_size=1, max_size=14).map(tuple),
        st.integers(1, 9),
        num_public,
        st.sampled_from(["", "", "salt"]),
        st.sampled_from(["", "", "adapter"]),
        st.integers(0, 3),
    )


def _driver(**config: object) -> CoreDriver:
    return CoreDriver(lambda: _SAMPLED, features=frozenset(Feature), max_adapters=2, **config)


# -- which blocks are shared ---------------------------------------------------------------------


def _names(ask: _Ask, tokens: Sequence[int], block_size: int) -> list[object]:
    """What blocks are known by: all that must be equal, or else they are not the same block."""
    num_public = min(ask.num_public, len(ask.prompt)) // block_size
    return [
        (
            ask.adapter,
            ask.salt,
            tuple(tokens[: (index + 1) * block_size]),
            None if index < num_public else (ask.tenant, num_public),
        )
        for index in range(len(tokens) // block_size)
    ]


@property_settings
@given(
    st.lists(
        st.tuples(
            _asks(["", "a", "b"], num_public=st.sampled_from([0, 2, 4, 7, 8, 99])),
            st.none() | st.integers(0, 15),
        ),
        min_size=6,
        max_size=16,
    ),
    st.sampled_from([1, 2, 3, 4]),
)
def test_block_is_shared_between_tenants_exactly_when_it_is_public_for_both(
    asks: list[tuple[_Ask, int | None]], block_size: int
) -> None:
    """Some prompts are what was said before, by whomever: the prompt, its answer, and more."""
    driver = _driver(block_size=block_size, num_device_blocks=2000)
    known: set[object] = set()
    said: list[tuple[int, ...]] = []
    for ask, follows in asks:
        if follows is not None and said:
            before = said[follows % len(said)][:_MAX_FOLLOWED]
            ask = replace(ask, prompt=before + ask.prompt)
        prompt, names = list(ask.prompt), _names(ask, ask.prompt, block_size)
        most = (len(prompt) - 1) // block_size
        num_known = next((i for i, n in enumerate(names[:most]) if n not in known), most)

        request = _add(driver, ask)
        driver.run()

        assert request.num_cached_tokens == num_known * block_size
        tokens = request.sequence.token_ids.tolist()
        said.append(tuple(tokens))
        # Of the last token that was sampled, nothing was computed.
        known.update(_names(ask, tokens[:-1], block_size))


# -- what the watcher sees -----------------------------------------------------------------------


def _add(driver: CoreDriver, ask: _Ask) -> Request:
    return driver.add(
        list(ask.prompt), scheduling=ask.scheduling, max_tokens=ask.max_tokens, ignore_eos=True
    )


def _seen(
    asks: Iterable[_Ask], *, depth: int, in_steps_of_its_own: bool, **config: object
) -> list[object]:
    """All that the watcher could learn: its rows of each step, and what was cached for it.

    Its requests are called by their number. `in_steps_of_its_own`: steps without any of its rows
    are not counted.
    """
    driver = _driver(**config)
    of_watcher: dict[str, tuple[int, Request]] = {}
    seen: list[object] = []

    def step() -> bool:
        while len(driver.in_flight) < depth and (plan := driver.plan()) is not None:
            rows = [
                (of_watcher[name][0], first, count)
                for name, first, count in driver.rows_of(plan)
                if name in of_watcher
            ]
            if rows or not in_steps_of_its_own:
                seen.append(rows)
        if not driver.in_flight:
            return False
        driver.answer()
        return True

    for ask in asks:
        for _ in range(ask.num_steps_before):
            step()
        request = _add(driver, ask)
        if ask.tenant == _WATCHER:
            of_watcher[request.request_id] = (len(of_watcher), request)
    while step():
        pass
    cached = [request.num_cached_tokens for _, request in of_watcher.values()]
    return [seen, cached]


def _private(*tenants: str) -> st.SearchStrategy[list[_Ask]]:
    return st.lists(_asks(tenants, num_public=st.just(0)), min_size=1, max_size=8)


def _says_otherwise(ask: _Ask) -> _Ask:
    """The same request with other tokens, if it is the victim's; equal ones stay equal."""
    if ask.tenant == _WATCHER:
        return ask
    return replace(ask, prompt=tuple(token + len(_LETTERS) for token in ask.prompt))


@property_settings
@given(_private(_VICTIM), _private(_WATCHER), st.integers(1, 2))
def test_watcher_sees_the_same_when_somebody_was_there_before_it(
    of_victim: list[_Ask], of_watcher: list[_Ask], depth: int
) -> None:
    def seen(*asks: _Ask) -> list[object]:
        return _seen(
            asks, depth=depth, in_steps_of_its_own=True, num_device_blocks=2000, max_num_waiting=64
        )

    # A step in flight may still hold the row of somebody who has ended.
    last_of_victim = _Ask(_VICTIM, (1,))
    comes_later = replace(of_watcher[0], num_steps_before=200)

    alone = seen(comes_later, *of_watcher[1:])
    after = seen(*of_victim, last_of_victim, comes_later, *of_watcher[1:])

    assert after == alone


@property_settings
@given(
    _private(_VICTIM, _WATCHER),
    st.sampled_from(sorted(QUEUE_POLICIES)),
    st.sampled_from([8, 12, 30, 200]),
    st.sampled_from([0, 8]),
    st.integers(1, 2),
)
def test_watcher_sees_the_same_when_the_others_say_something_else(
    asks: list[_Ask], policy: str, num_blocks: int, num_host_blocks: int, depth: int
) -> None:
    """Side by side, and also where blocks are so scarce that they are evicted and swapped."""

    def seen(asks: Iterable[_Ask]) -> list[object]:
        return _seen(
            asks,
            depth=depth,
            in_steps_of_its_own=False,
            queue_policy=policy,
            num_device_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            max_num_batched_tokens=16,
            max_num_seqs=4,
        )

    assert seen(map(_says_otherwise, asks)) == seen(asks)
