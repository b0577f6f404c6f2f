"""Requests over 8-bit keys and values, preempted and sharing prefixes: tokens as each has alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from executor_service.backends import Compute, choose_compute
from executor_service.checkpoint import ModelConfig, load_model
from tests.support.models.model_pair import ModelPair, ObservedEngine, make_request

pytestmark = pytest.mark.usefixtures("native_library")

BLOCK_SIZE = 8
NUM_OUTPUT_TOKENS = 20


def _engine(pair: ModelPair, compute: Compute, **options: object) -> ObservedEngine:
    return ObservedEngine(pair, compute=compute, block_size=BLOCK_SIZE, **options)  # type: ignore[arg-type]


def _serve(engine: ObservedEngine, prompts: Sequence[list[int]]) -> list[list[list[int]]]:
    requests = [
        make_request(index, prompt, max_tokens=NUM_OUTPUT_TOKENS)
        for index, prompt in enumerate(prompts)
    ]
    return engine.serve(*requests)


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("num_host_blocks", [0, 16])
def test_tokens_stay_the_same_when_requests_are_preempted_and_share_a_prefix(
    pair_of: Callable[..., ModelPair], name: str, num_host_blocks: int
) -> None:
    pair = pair_of("llama")
    config = ModelConfig(str(pair.directory), kv_cache_dtype=name)
    compute = choose_compute(lambda: load_model(config), "native", BLOCK_SIZE)
    common, *rest = pair.prompts((20, 3, 17, 9, 12, 1))
    prompts = [common + each for each in rest]
    alone = [
        _serve(_engine(pair, compute, num_device_blocks=16, prefix_caching=False), [prompt])[0]
        for prompt in prompts
    ]

    engine = _engine(
        pair,
        compute,
        num_device_blocks=11,
        num_host_blocks=num_host_blocks,
        prefix_caching=True,
        preempt_at=range(3, 60, 4),
    )

    assert _serve(engine, prompts) == alone
    assert engine.core.num_preemptions > 5
    assert (engine.core.num_swapped_out > 0) == (num_host_blocks > 0)
