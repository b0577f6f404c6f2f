"""The names of blocks: equal for equal contexts, and for no others."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import pytest

from scheduler_service.scheduler.engine.blocks.prefix_cache import extend_chain, root_hash
from scheduler_service.scheduler.values.request import Request, SchedulingParams, token_array
from scheduler_service.scheduler.values.sampling_params import SamplingParams
from tests.support.core.driver import make_config


def root(
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


def chain(tokens: list[int], block_size: int = 2, start: bytes = b"root") -> list[bytes]:
    hashes = [start]
    extend_chain(hashes, token_array(tokens), len(tokens) // block_size, block_size)
    return hashes


def test_root_hash_is_the_same_when_the_context_is() -> None:
    assert root() == root()


@pytest.mark.parametrize(
    "change",
    [{"model": "n"}, {"tenant": "u"}, {"adapter": "b"}, {"salt": "t"}, {"encoder": [1, 3]}],
)
def test_root_hash_differs_when_one_field_does(change: dict[str, str]) -> None:
    assert root(**change) != root()  # type: ignore[arg-type]


def test_root_hash_is_the_same_for_tenants_when_they_share() -> None:
    assert root(tenant="a", separates_tenants=False) == root(tenant="b", separates_tenants=False)


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
    assert root(**left) != root(**right)  # type: ignore[arg-type]


def test_root_hash_differs_when_one_field_looks_like_two() -> None:
    # One field that contains what would separate it from the next.
    separator = (1).to_bytes(8, "little").decode("latin-1")
    assert root(adapter=f"a{separator}s", salt="") != root(adapter="a", salt="s")


def test_extend_chain_gives_another_name_when_a_token_differs() -> None:
    assert chain([1, 2])[1] != chain([1, 3])[1]


def test_extend_chain_gives_another_name_when_only_the_parent_differs() -> None:
    assert chain([1, 2, 5, 6])[2] != chain([3, 4, 5, 6])[2]
    assert chain([1, 2], start=b"x")[1] != chain([1, 2], start=b"y")[1]


def test_extend_chain_agrees_when_prefixes_agree() -> None:
    assert chain([1, 2, 3, 4, 5, 6])[:3] == chain([1, 2, 3, 4, 9, 9])[:3]


def test_extend_chain_gives_the_same_when_it_is_extended_bit_by_bit() -> None:
    tokens = token_array(list(range(12)))
    at_once, by_steps = [b"root"], [b"root"]
    extend_chain(at_once, tokens, 4, 3)
    for num_blocks in range(1, 5):
        extend_chain(by_steps, tokens, num_blocks, 3)
    assert at_once == by_steps
    assert len(at_once) == 5


def test_extend_chain_leaves_it_alone_when_it_is_long_enough() -> None:
    hashes = chain([1, 2, 3, 4])
    before = list(hashes)
    extend_chain(hashes, np.zeros(2, np.int32), 1, 2)
    assert hashes == before


def test_extend_chain_tells_tokens_apart_when_their_low_bytes_agree() -> None:
    assert chain([1, 2])[1] != chain([257, 2])[1]
