"""Blocks that tenants share because both say that they are public."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_service.scheduler.values.request import SchedulingParams
from tests.support.core.driver import CoreDriver
from tests.support.core.parts import Tables

BLOCK_SIZE = 4
PROMPT = list(range(1, 18))  # Four full blocks, and one token.
DEFAULT_TENANT = ""


def num_found(
    first: SchedulingParams,
    second: SchedulingParams,
    *,
    encoder: list[int] | None = None,
    **config: object,
) -> int:
    """How many tokens of PROMPT the second request finds after the first has published all."""
    tables = Tables(**config)
    publisher = tables.request(PROMPT, scheduling=first, encoder=encoder).sequence
    table = tables.place(publisher)
    prefixes = tables.blocks.prefixes
    prefixes.publish(publisher, publisher.token_ids, table[: len(PROMPT) // BLOCK_SIZE], 0)
    finder = tables.request(PROMPT, scheduling=second, encoder=encoder).sequence
    return prefixes.find(finder).num_tokens


def public(tenant: str, num_tokens: int) -> SchedulingParams:
    return SchedulingParams(tenant=tenant, num_public_prefix_tokens=num_tokens)


@pytest.mark.parametrize(
    ("of_first", "of_second", "shared"),
    [(8, 8, 8), (11, 8, 8), (8, 12, 8), (3, 16, 0), (16, 16, 16), (99, 2**31 - 1, 16), (0, 16, 0)],
)
def test_find_returns_whole_blocks_of_another_tenant_when_public_for_both(
    of_first: int, of_second: int, shared: int
) -> None:
    assert num_found(public("a", of_first), public("b", of_second)) == shared


@pytest.mark.parametrize("tenant", ["b", DEFAULT_TENANT])
def test_find_returns_nothing_when_only_the_finder_says_that_it_is_public(tenant: str) -> None:
    assert num_found(public("a", 0), public(tenant, 16)) == 0
    assert num_found(public(DEFAULT_TENANT, 0), public("b", 16)) == 0


def test_find_returns_all_when_the_tenant_itself_comes_again() -> None:
    assert num_found(public("a", 8), public("a", 8)) == 16
    assert num_found(public("a", 8), public("a", 11)) == 16


@pytest.mark.parametrize(("salt", "adapter"), [("s", ""), ("", "x")])
def test_find_returns_nothing_when_salt_or_adapter_keep_public_blocks_apart(
    salt: str, adapter: str
) -> None:
    of_a, of_b = public("a", 16), public("b", 16)
    apart_a, apart_b = (replace(p, cache_salt=salt, adapter=adapter) for p in (of_a, of_b))
    assert num_found(of_a, apart_b) == 0
    assert num_found(apart_a, apart_b) == 16


def test_find_returns_nothing_when_the_encoder_has_private_input() -> None:
    assert num_found(public("a", 16), public("b", 16), encoder=[5, 6]) == 0
    assert num_found(public("a", 16), public("a", 16), encoder=[5, 6]) == 16


def test_find_returns_all_when_tenants_share_anyway() -> None:
    assert num_found(public("a", 8), public("b", 0), separates_tenants=False) == 16


def test_find_returns_nothing_when_the_cache_is_bypassed() -> None:
    of_a, of_b = public("a", 16), public("b", 16)
    assert num_found(of_a, replace(of_b, uses_prefix_cache=False)) == 0
    assert num_found(replace(of_a, uses_prefix_cache=False), of_b) == 0


def test_outputs_are_private_when_all_of_the_prompt_is_public() -> None:
    driver = CoreDriver()
    scheduling = {
        tenant: SchedulingParams(tenant=tenant, num_public_prefix_tokens=2**31 - 1)
        for tenant in ("a", "b")
    }
    first = driver.add(8, scheduling=scheduling["a"], max_tokens=10)
    driver.run()
    conversation = [*first.sequence.token_ids.tolist(), 50]

    again = driver.add(
        conversation,
        scheduling=SchedulingParams(tenant="a", num_public_prefix_tokens=8),
        max_tokens=1,
    )
    other = driver.add(conversation, scheduling=scheduling["b"], max_tokens=1)
    driver.run()

    assert (again.num_cached_tokens, other.num_cached_tokens) == (16, 8)
