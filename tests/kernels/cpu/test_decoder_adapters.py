"""Adapters in the native decoder: against merged weights, and the bits of rows that share steps."""

from __future__ import annotations

import functools
import gc
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from executor_service.backends import native_draw
from executor_service.decoders import NativeModel, NativePagedModel
from executor_service.device import KVCache
from executor_service.model import (
    AdaptedTokens,
    Adapter,
    InputBatch,
    LoadedModel,
)
from executor_service.runner import ModelRunner
from executor_service.steps import RowStatus, StepInput, run_on
from splitserve_kernels.cpu import NativeLibrary, RevealedStates
from splitserve_kernels.low_rank_update import LowRankUpdate
from splitserve_kernels.paged_batch import build_paged_batch
from tests.kernels.cpu.tiny_decoders import (
    AdapterKind,
    DirectoryOf,
    Served,
    load_decoder,
    load_rounded,
    merged,
    random_adapter,
    random_tokens,
    serve,
)
from tests.support.steps.step_driver import GREEDY, Row, make_step

pytestmark = pytest.mark.cases(8)

RELATIVE_TOLERANCE = 1e-5
ALL = AdapterKind()
SOME = AdapterKind(r"(q|v|up|down)_proj$", ranks=(3, 5, 40))
DORA = AdapterKind(r"_proj$|lm_head", ranks=(1, 2, 17), has_vectors=True)
EMBEDDING = AdapterKind(ranks=(8,), has_embedding=True)
OWN = AdapterKind(has_own=True)
# Query heads of llama_one_kv_head end within a vector; llama_odd_vocabulary has half panels of the
# gate and of the up projection alone.
CASES = [
    ("llama_one_kv_head", ALL),
    ("llama_one_kv_head", SOME),
    ("llama_bias", DORA),
    ("llama_tied", EMBEDDING),
    ("llama_odd_vocabulary", OWN),
    ("llama_odd_vocabulary", ALL),
    ("qwen3", SOME),
]


@functools.cache
def _hugging_face(directory: Path) -> Any:  # noqa: ANN401
    from transformers import AutoModelForCausalLM

    untyped: Any = AutoModelForCausalLM
    model = untyped.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
    return model.requires_grad_(False)


@functools.cache
def _expected(directory: Path, kind: AdapterKind, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Of a merged model: logits [L, V] and the state [L, W] behind the first layer."""
    model = merged(_hugging_face(directory), _adapter(directory, kind))
    tokens = torch.tensor([random_tokens(num_tokens, seed=1)])
    output = model(tokens, use_cache=False, output_hidden_states=True)
    return output.logits[0], output.hidden_states[1][0]


@functools.cache
def _adapter(directory: Path, kind: AdapterKind, seed: int = 1) -> Adapter:
    return random_adapter(_hugging_face(directory), kind, seed)


def _error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.cases(4)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_logits_are_those_of_merged_weights_when_weights_are_float32(
    library: NativeLibrary, directory_of: DirectoryOf, name: str, kind: AdapterKind
) -> None:
    """Among rows with another adapter and with none; more tokens than a block of rows has."""
    directory, loaded = directory_of(name), load_decoder(directory_of(name))
    adapter, other = _adapter(directory, kind), _adapter(directory, ALL, seed=2)
    sequences = [
        Served(random_tokens(9, seed=3), [8, 1]),
        Served(random_tokens(140, seed=1), [130, 1, 9], adapter),
        Served(random_tokens(9, seed=4), [7, 2], other),
    ]
    native = NativeModel(load_decoder(directory), library)
    _, actual, _ = serve(native, loaded, sequences, block_size=16)
    expected, _ = _expected(directory, kind, 140)
    assert _error(actual, expected) <= RELATIVE_TOLERANCE


def test_revealed_states_are_those_of_merged_weights(
    library: NativeLibrary, directory_of: DirectoryOf
) -> None:
    directory = directory_of("llama_bias")
    loaded = load_decoder(directory)
    native = NativeModel(load_decoder(directory), library)
    states = torch.empty(1, 40, native.width)
    revealed = RevealedStates(np.array([1], np.int32), states)
    index = torch.tensor([3, 39])
    logits = _one_pass(native, loaded, _adapter(directory, DORA), index, revealed)
    expected_logits, expected_state = _expected(directory, DORA, 40)
    assert _error(states[0], expected_state) <= RELATIVE_TOLERANCE
    assert _error(logits, expected_logits[index]) <= RELATIVE_TOLERANCE


def _one_pass(
    native: NativeModel,
    loaded: LoadedModel,
    adapter: Adapter,
    index: Tensor,
    revealed: RevealedStates | None = None,
) -> Tensor:
    cache = KVCache(loaded.layers, 16, 3, 0, loaded.dtype, loaded.device)
    tokens = torch.tensor(random_tokens(40, seed=1))
    batch = build_paged_batch(
        torch.arange(3)[None], torch.zeros(1, dtype=torch.int64), torch.tensor([40]), 16
    )
    adapted = AdaptedTokens((adapter,), np.zeros(40, np.int32))
    positions = torch.arange(40)
    return native.run(tokens, positions, batch, index, cache, revealed, adapted)


# -- Bits ------------------------------------------------------------------------------------------

BASES = [
    ("llama_odd_mlp", torch.float32, ""),
    ("llama_one_kv_head", torch.bfloat16, ""),
    ("llama_odd_mlp", torch.bfloat16, "int8"),
    ("llama_odd_mlp", torch.bfloat16, "int4"),
    ("qwen3", torch.bfloat16, "exact int4"),
]


@dataclass(frozen=True, slots=True)
class Decoder:
    """A native decoder and adapters in its dtype."""

    native: NativeModel
    loaded: LoadedModel
    library: NativeLibrary
    adapters: list[Adapter]


@pytest.fixture(scope="module", params=BASES, ids=lambda base: "-".join(map(str, base)))
def decoder(
    request: pytest.FixtureRequest, library: NativeLibrary, directory_of: DirectoryOf
) -> Decoder:
    name, dtype, quantization = request.param
    directory, rounding = directory_of(name, dtype), quantization.removeprefix("exact ")
    loaded = load_rounded(directory, rounding) if rounding == "int4" else load_decoder(directory)
    is_exact = "exact" in quantization
    native = NativeModel(loaded, library, is_int8=rounding == "int8", is_exact=is_exact)
    model = load_decoder(directory).model
    kinds = (ALL, SOME, DORA, EMBEDDING, OWN)
    adapters = [random_adapter(model, kind, seed) for seed, kind in enumerate(kinds)]
    return Decoder(native, loaded, library, adapters)


def _served(decoder: Decoder, sequences: list[Served]) -> list[Tensor]:
    return serve(decoder.native, decoder.loaded, sequences, block_size=4)


@pytest.mark.usefixtures("num_threads")
def test_rows_have_the_same_bits_when_rows_with_other_adapters_share_the_step(
    decoder: Decoder,
) -> None:
    """And when prompts are cut, and when threads are more."""
    torch.set_num_threads(1)
    tokens = random_tokens(40, seed=8)
    served: list[Adapter | None] = [*decoder.adapters, None]
    alone = [_served(decoder, [Served(tokens, [40], each)])[0] for each in served]
    torch.set_num_threads(2)
    cuts = [[1] * 40, [39, 1], [7, 1, 32], [20, 20], [40], [3, 1, 1, 35]]
    pairs = list(zip(cuts, served, strict=True)) * 3
    together = _served(decoder, [Served(tokens, cut, each) for cut, each in pairs])
    assert all(map(torch.equal, together, alone * 3))


def test_rows_of_an_adapter_differ_from_the_model(decoder: Decoder) -> None:
    """The other tests would pass without this one if no adapter were applied."""
    tokens = random_tokens(12, seed=8)
    served: list[Adapter | None] = [None, *decoder.adapters]
    plain, *adapted = _served(decoder, [Served(tokens, [12], each) for each in served])
    assert min(_error(logits, plain) for logits in adapted) > 0.1


@pytest.mark.usefixtures("num_threads")
def test_tokens_are_those_of_turns_when_rows_with_adapters_run_on(decoder: Decoder) -> None:
    torch.set_num_threads(2)
    step = _step(decoder)
    output = _runner(decoder, _OnlyRuns).execute(step)
    runner = _runner(decoder)
    expected = run_on(step, runner.execute)
    rows = range(step.num_rows)
    assert output.runs is not None
    assert [output.token_ids_of(row) for row in rows] == [
        expected.token_ids_of(row) for row in rows
    ]


def test_row_fails_alone_when_its_adapter_is_not_loaded(decoder: Decoder) -> None:
    runner = _runner(decoder)
    runner.adapters.by_name = {a.name: a for a in decoder.adapters[1:]}
    output = runner.execute(_step(decoder))
    is_failed = [status == RowStatus.FAILED for status in output.row_statuses]
    assert is_failed == [True, False, False, False, False, False]


class _OnlyRuns(NativePagedModel):
    """Computes rows that run on, and no others."""

    def logits(self, batch: InputBatch) -> Tensor:
        raise AssertionError("a pass of one token")


def _runner(decoder: Decoder, make: type[NativePagedModel] = NativePagedModel) -> ModelRunner:
    loaded = decoder.loaded
    cache = KVCache(loaded.layers, 4, 60, 0, loaded.dtype, loaded.device)
    generator = torch.Generator().manual_seed(3)
    for pool in (*cache.key_pools, *cache.value_pools):
        pool.normal_(generator=generator)
    runner = ModelRunner(loaded, cache, make(decoder.native, cache), native_draw(decoder.library))
    runner.adapters.by_name = {adapter.name: adapter for adapter in decoder.adapters}
    return runner


def _step(decoder: Decoder) -> StepInput:
    """A row with each adapter and one without; they get different numbers of tokens."""
    names = [*(adapter.name for adapter in decoder.adapters), ""]
    rows = [
        Row([9 + i], 5, list(range(6 * i, 6 * i + 6)), 1, params=GREEDY, adapter=name)
        for i, name in enumerate(names)
    ]
    num_run_on = np.array([0, 9, 3, 0, 6, 5], np.int32)
    return replace(make_step(rows), num_run_on_tokens=num_run_on)


# -- Life of an adapter ----------------------------------------------------------------------------


def test_packed_adapter_is_freed_with_the_adapter(
    library: NativeLibrary, directory_of: DirectoryOf
) -> None:
    directory = directory_of("llama")
    native = NativeModel(load_decoder(directory), library)
    adapter = random_adapter(_hugging_face(directory), ALL, seed=5)
    packed = weakref.ref(native.prepare_adapter(adapter))
    assert packed() is native.prepare_adapter(adapter)
    del adapter
    gc.collect()
    assert packed() is None


def test_adapter_is_refused_when_it_fits_another_model(
    library: NativeLibrary, directory_of: DirectoryOf
) -> None:
    native = NativeModel(load_decoder(directory_of("llama")), library)
    none = torch.zeros(4, 4)
    unknown = Adapter("a", {"model.layers.9.mlp.up_proj": LowRankUpdate(none, none, 1.0)})
    with pytest.raises(ValueError, match=r"no model\.layers\.9\.mlp\.up_proj"):
        native.prepare_adapter(unknown)
    with pytest.raises(ValueError, match=r"are \[4, 4\]"):
        native.prepare_adapter(Adapter("a", {}, own_head=none))
    sizes = Adapter("a", {"model.layers.0.mlp.up_proj": LowRankUpdate(none, none, 1.0)})
    with pytest.raises(RuntimeError, match="must match"):
        native.prepare_adapter(sizes)
