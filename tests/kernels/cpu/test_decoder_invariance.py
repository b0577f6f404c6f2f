"""A sequence's logits are the same bits whatever shares its steps and however it was cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor_service.decoders import NativeModel, build_native_model
from executor_service.model import LoadedModel
from executor_service.quantization import ROUNDINGS
from splitserve_kernels.cpu import NativeLibrary
from tests.kernels.cpu.tiny_decoders import (
    DirectoryOf,
    Served,
    load_decoder,
    load_rounded,
    random_tokens,
    serve,
)

pytestmark = pytest.mark.cases(10)

NAMES = ("llama_odd_mlp", "qwen3", "mistral")
DTYPES = (torch.float32, torch.bfloat16)
BLOCK_SIZES = (1, 4, 16)
LENGTH = 140
_SETTINGS = settings(
    max_examples=7, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@dataclass(frozen=True, slots=True)
class Decoder:
    """`whole`: for each block size the logits [LENGTH, V] of `tokens`, alone and in one step."""

    native: NativeModel
    loaded: LoadedModel
    tokens: list[int]
    whole: Mapping[int, Tensor]


@pytest.fixture(
    scope="module",
    params=[
        *((name, dtype, "") for name in NAMES for dtype in DTYPES),
        ("llama_odd_mlp", torch.bfloat16, "int8"),
        ("llama_odd_mlp", torch.bfloat16, "int4"),
        ("qwen3", torch.bfloat16, "int4"),
        ("qwen3", torch.bfloat16, "exact int4"),
        ("qwen3", torch.bfloat16, "fp8"),
    ],
)
def decoder(
    request: pytest.FixtureRequest,
    library: NativeLibrary,
    directory_of: DirectoryOf,
) -> Decoder:
    name, dtype, quantization = request.param
    directory, rounding = directory_of(name, dtype), quantization.removeprefix("exact ")
    is_rounded = rounding in ROUNDINGS
    loaded = load_rounded(directory, rounding) if is_rounded else load_decoder(directory)
    native = build_native_model(
        loaded, library, is_int8=quantization == "int8", is_exact="exact" in quantization
    )
    tokens = random_tokens(LENGTH, seed=8)
    whole = {
        block_size: serve(native, loaded, [Served(tokens, [LENGTH])], block_size)[0]
        for block_size in BLOCK_SIZES
    }
    return Decoder(native, loaded, tokens, whole)


def _chunks(sizes: list[int], length: int) -> list[int]:
    """Takes `sizes` in turn until they add up to `length`."""
    chunks: list[int] = []
    while sum(chunks) < length:
        chunks.append(min(sizes[len(chunks) % len(sizes)], length - sum(chunks)))
    return chunks


@pytest.mark.cases(4)
@given(
    block_size=st.sampled_from(BLOCK_SIZES),
    sizes=st.lists(st.integers(1, LENGTH), min_size=1, max_size=5),
)
@example(block_size=4, sizes=[1])  # decode: each token alone
@_SETTINGS
def test_decoder_gives_the_same_bits_when_a_prompt_is_cut(
    decoder: Decoder, block_size: int, sizes: list[int]
) -> None:
    sequence = Served(decoder.tokens, _chunks(sizes, LENGTH))
    (cut,) = serve(decoder.native, decoder.loaded, [sequence], block_size)
    assert torch.equal(cut, decoder.whole[block_size])


@given(
    block_size=st.sampled_from(BLOCK_SIZES),
    lengths=st.lists(st.integers(1, 60), min_size=6, max_size=6),
    place=st.integers(0, 6),
    size=st.integers(1, LENGTH),
)
@_SETTINGS
def test_decoder_gives_the_same_bits_when_others_share_the_step(
    decoder: Decoder, block_size: int, lengths: list[int], place: int, size: int
) -> None:
    sequences = [
        Served(random_tokens(length, seed), _chunks([length // 2 + 1], length))
        for seed, length in enumerate(lengths)
    ]
    sequences.insert(place, Served(decoder.tokens, _chunks([size], LENGTH)))
    together = serve(decoder.native, decoder.loaded, sequences, block_size)
    assert torch.equal(together[place], decoder.whole[block_size])


def test_decoder_gives_the_same_bits_when_blocks_are_of_another_size(decoder: Decoder) -> None:
    first, *others = decoder.whole.values()
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.usefixtures("num_threads")
def test_decoder_gives_the_same_bits_when_threads_are_more(decoder: Decoder) -> None:
    torch.set_num_threads(2)
    sequences = [Served(decoder.tokens, [LENGTH - 1, 1])]
    (logits,) = serve(decoder.native, decoder.loaded, sequences, 16)
    assert torch.equal(logits, decoder.whole[16])
