"""The native decoder against Hugging Face: logits, and tokens of the whole runner."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from executor_service.backends import NATIVE, choose_compute
from executor_service.decoders import build_native_model, why_not_native
from executor_service.device import KVCache
from executor_service.model import SCRATCH_BLOCK_SIZE, num_scratch_blocks, run_in_steps
from executor_service.runner import CacheConfig, build_runner
from splitserve_kernels.cpu import STEP_PARTS, NativeLibrary
from splitserve_kernels.cpu.build import VARIANTS
from splitserve_kernels.paged_batch import PagedBatch
from tests.kernels.cpu.tiny_decoders import (
    DECODERS,
    DirectoryOf,
    hugging_face_logits,
    load_decoder,
    random_tokens,
)
from tests.support.models.model_pair import generate_greedily, load_reference
from tests.support.steps.step_driver import DrivenSequence, drive

pytestmark = pytest.mark.cases(10)

# Largest absolute difference of a logit; logits are of about 10.
FLOAT32_TOLERANCE = 1e-4
# Size of the difference over the size of the (centred) logits of a token, its median: activations
# and KV are rounded to 7 bits behind the point, layer after layer.
BFLOAT16_RELATIVE_TOLERANCE = 0.03
TOKENS = torch.tensor([random_tokens(90, seed) for seed in (1, 2)])
PROMPTS = [random_tokens(length, seed=length) for length in (5, 33, 70)]
NUM_OUTPUT_TOKENS = 12
# (chunk size, block size); None: whole prompts.
CUTS = ((1, 16), (7, 4), (None, 4), (64, 16))


class Truth:
    """What Hugging Face says, asked once for all instruction sets."""

    def __init__(self) -> None:
        self._logits: dict[Path, torch.Tensor] = {}
        self._outputs: dict[Path, list[list[int]]] = {}

    def logits(self, directory: Path) -> torch.Tensor:
        """[Q, L, V] of TOKENS."""
        if directory not in self._logits:
            rows = [hugging_face_logits(directory, row.tolist()) for row in TOKENS]
            self._logits[directory] = torch.stack(rows)
        return self._logits[directory]

    def outputs(self, directory: Path) -> list[list[int]]:
        """Greedy tokens behind each of PROMPTS."""
        if directory not in self._outputs:
            model = load_reference(directory)
            self._outputs[directory] = [
                generate_greedily(model, prompt, NUM_OUTPUT_TOKENS) for prompt in PROMPTS
            ]
        return self._outputs[directory]


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth()


@torch.inference_mode()
def _native_logits(library: NativeLibrary, directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    """[Q, L, V] of `tokens` [Q, L], computed in two steps."""
    loaded = load_decoder(directory)
    assert why_not_native(loaded) is None
    native = build_native_model(loaded, library)
    num_blocks = num_scratch_blocks(tokens)
    cache = KVCache(loaded.layers, SCRATCH_BLOCK_SIZE, num_blocks, 0, loaded.dtype, loaded.device)

    def forward(
        input_ids: torch.Tensor, positions: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        index = torch.arange(len(input_ids))
        return native.run(input_ids, positions, batch, index, cache).clone()

    return run_in_steps(tokens, forward)


def test_decoder_measures_each_part_of_a_step_when_asked(
    library: NativeLibrary, directory_of: DirectoryOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    part_ns = torch.zeros(len(STEP_PARTS), dtype=torch.int64)
    monkeypatch.setattr(library, "part_ns", part_ns)
    started_ns = time.perf_counter_ns()
    _native_logits(library, directory_of("llama"), torch.tensor([random_tokens(40, seed=1)]))
    is_measured = dict(zip(STEP_PARTS, (part_ns > 0).tolist(), strict=True))
    assert is_measured == dict.fromkeys(STEP_PARTS, True) | {"draw": False}
    assert int(part_ns.sum()) < time.perf_counter_ns() - started_ns


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", DECODERS)
def test_decoder_gives_hugging_face_logits_when_weights_are_float32(
    library: NativeLibrary, name: str, directory_of: DirectoryOf, truth: Truth
) -> None:
    directory = directory_of(name)
    actual, expected = _native_logits(library, directory, TOKENS), truth.logits(directory)
    torch.testing.assert_close(actual, expected, atol=FLOAT32_TOLERANCE, rtol=0)


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", DECODERS)
def test_decoder_gives_hugging_face_logits_when_weights_are_bfloat16(
    library: NativeLibrary, name: str, directory_of: DirectoryOf, truth: Truth
) -> None:
    directory = directory_of(name, torch.bfloat16)
    actual, expected = _native_logits(library, directory, TOKENS), truth.logits(directory)
    sizes = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
    error = ((actual - expected).norm(dim=-1) / sizes).median()
    assert float(error) <= BFLOAT16_RELATIVE_TOLERANCE


def _cuts(library: NativeLibrary, name: str) -> Sequence[tuple[int | None, int]]:
    """Every second one: instruction sets take turns, and so do models."""
    variants = [variant.name for variant in VARIANTS]
    return CUTS[(list(DECODERS).index(name) + variants.index(library.variant)) % 2 :: 2]


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", DECODERS)
def test_runner_gives_hugging_face_tokens_when_the_decoder_is_native(
    library: NativeLibrary,
    name: str,
    directory_of: DirectoryOf,
    truth: Truth,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("executor_service.backends.choose.load_library", lambda: library)
    directory = directory_of(name)
    compute = choose_compute(lambda: load_decoder(directory), NATIVE, 16)
    assert compute.description == f"native decoder ({library.variant})"
    for chunk_size, block_size in _cuts(library, name):
        cache_config = CacheConfig(block_size, num_device_blocks=60, num_host_blocks=0)
        runner = build_runner(compute.loaded, cache_config, compute.make_model)
        sequences = [
            DrivenSequence(prompt, NUM_OUTPUT_TOKENS, start_step=2 * index)
            for index, prompt in enumerate(PROMPTS)
        ]
        drive(
            runner, sequences, block_size=block_size, num_blocks=60, chunk_size=chunk_size, seed=1
        )
        assert [sequence.output for sequence in sequences] == truth.outputs(directory)
