"""Adapters in models on GPUs: logits are those of PEFT, of any rows beside each other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from executor_service.adapters import read_adapter
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.device import CudaGraphs, KVCache, Recorder
from executor_service.errors import TrialFailed
from executor_service.model import (
    Adapter,
    AdapterLimits,
    AddLowRank,
    LoadedModel,
    MakeModel,
    PagedModel,
    attending_with,
    takes_adapters,
    torch_model,
)
from executor_service.runner import (
    CacheConfig,
    ModelRunner,
    RecordedModels,
    build_runner,
    compile_kernels,
)
from executor_service.trials import try_low_rank
from splitserve_kernels import reference
from splitserve_kernels.adapter_tiles import SlotLinear, TokenTiles
from tests.support.devices.low_rank_in_torch import add_low_rank_in_torch
from tests.support.devices.recorded_ops import TORCH_KERNELS, RunAgain, SortingDraw
from tests.support.models.peft_adapters import files_of, logits_of, make_adapter
from tests.support.models.tiny_models import make_tiny_model
from tests.support.steps.step_driver import Row, make_step
from tests.unit.executor.adapters.adapted_rows import TOKENS, Served, difference

pytest.importorskip("triton", reason="triton is not installed")

from executor_service.decoders import GpuQuantizedLinear, gpu_decoder
from executor_service.decoders.gpu_decoder import GpuDecoder, GpuDecoderModel, decoder_slots
from splitserve_kernels.gpu.attention import backend as triton_attention
from splitserve_kernels.gpu.low_rank import add_low_rank

# Plain torch waits for a GPU, so that nothing can be recorded there.
ATTENTION = triton_attention if torch.cuda.is_available() else reference

LIMITS = AdapterLimits(max_num=2, max_rank=16)
TEXTS = (TOKENS, TOKENS, [88, 3, 14, 15, 92, 65], [7, 17, 42])
NAMES = ("a@1", "", "b@2", "a@1")
# Of float32 logits, relative to the largest: sums in another order.
TOLERANCE = 1e-5
CHANGE = 0.01

ALL: dict[str, Any] = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}
SOME: dict[str, Any] = {
    "r": 3,
    "lora_alpha": 5,
    "use_rslora": True,
    "target_modules": ["q_proj", "down_proj"],
}
HEAD: dict[str, Any] = {"r": 2, "target_modules": ["v_proj", "lm_head"]}
# They change more than linear layers.
HEADS: tuple[dict[str, Any], dict[str, Any]] = (
    {"r": 2, "target_modules": ["embed_tokens", "v_proj", "lm_head"], "use_dora": True},
    {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
)
DORA: dict[str, Any] = {**ALL, "use_dora": True}
BIASES: dict[str, Any] = {**ALL, "bias": "lora_only"}

# Interpreted, each layer takes its time.
ONE_LAYER: Mapping[str, Any] = {"num_hidden_layers": 1}
EVEN: Mapping[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
ODD: Mapping[str, Any] = {"hidden_size": 42, "num_attention_heads": 6, "head_dim": 10}
# Architecture, overrides of its configuration, and two adapters.
DECODED: Mapping[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, ALL, SOME),
    "head": ("llama", {**ONE_LAYER, "tie_word_embeddings": False}, HEAD, ALL),
    "biases": ("qwen2", {**ONE_LAYER}, BIASES, DORA),
    "odd": (
        "llama",
        {**ONE_LAYER, "hidden_size": 42, "num_attention_heads": 6, "head_dim": 10},
        DORA,
        SOME,
    ),
}
# What models of `transformers` have beside those: joined layers, no linear layers but others of
# their kind, and layers that are no linear ones.
OTHERS: Mapping[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "phi3": ("phi3", {**ONE_LAYER}, ALL, {**DORA, "target_modules": ["qkv_proj", "down_proj"]}),
    "gpt2": ("gpt2", {"n_layer": 1}, {**ALL, "target_modules": ["c_attn", "c_proj"]}, DORA),
    "heads": ("llama", {**ONE_LAYER, "attention_bias": True}, *HEADS),
}


class Case:
    """A model on its device with two adapters, and what PEFT computes."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        architecture: str,
        overrides: Mapping[str, Any],
        options: tuple[Mapping[str, Any], Mapping[str, Any]],
        dtype: str = "float32",
    ) -> None:
        directory = make_tiny_model(architecture, folder / "model", overrides=dict(overrides))
        loaded = load_model(ModelConfig(str(directory), str(device), dtype))
        self.loaded = replace(loaded, adapter_limits=LIMITS)
        self.adapters: dict[str, Adapter] = {}
        self._oracles: dict[str, Any] = {}
        for name, each in zip(("a@1", "b@2"), options, strict=True):
            self._oracles[name] = make_adapter(directory, folder / name, **each)
            files = files_of(folder / name)
            self.adapters[name] = read_adapter(name, files, self.loaded, LIMITS.max_rank)

    def expected(self, tokens: list[int], name: str) -> Tensor:
        """PEFT's logits of the last two tokens."""
        return logits_of(self._oracles[name], tokens)[-2:, : self.loaded.vocab_size]


def _transformers(loaded: LoadedModel, cache: KVCache) -> PagedModel:
    return attending_with(ATTENTION, lambda: add_low_rank)(loaded, cache)


@pytest.fixture
def _without_kernels(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """For what the kernels do not matter to: interpreted, they take long."""
    if device.type == "cpu":
        monkeypatch.setitem(globals(), "add_low_rank", add_low_rank_in_torch)


@pytest.fixture(autouse=True)
def _without_kernels_of_layers(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    if device.type == "cpu":
        for name, in_torch in TORCH_KERNELS.items():
            monkeypatch.setattr(gpu_decoder, name, in_torch)


def _decoder(loaded: LoadedModel, cache: KVCache) -> PagedModel:
    slots = decoder_slots(loaded, lambda: add_low_rank)
    return GpuDecoderModel(GpuDecoder(loaded, ATTENTION), cache, slots)


class Replays:
    """A Recorder that counts replays. Without a GPU, what is recorded runs again."""

    def __init__(self, device: torch.device) -> None:
        self.count = 0
        self._recorder: Recorder = CudaGraphs() if device.type == "cuda" else RunAgain()

    @property
    def pool_bytes(self) -> int:
        return self._recorder.pool_bytes

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        recorded = self._recorder.record(run)

        def replay() -> None:
            self.count += 1
            recorded()

        return replay


def _assert_as_peft(case: Case, served: Served) -> None:
    logits = served.last_logits(TEXTS, NAMES).cpu()
    (plain,) = served.last_logits(TEXTS[1:2], [""]).cpu()
    for tokens, name, actual in zip(TEXTS, NAMES, logits, strict=True):
        if not name:
            assert difference(plain, actual) < TOLERANCE
            continue
        assert difference(case.expected(tokens, name), actual) < TOLERANCE, name
        if tokens == TEXTS[1]:
            assert difference(plain, actual) > CHANGE


@pytest.mark.parametrize("name", DECODED)
def test_decoder_says_what_peft_says_when_rows_have_adapters(
    name: str, tmp_path: Path, device: torch.device
) -> None:
    architecture, overrides, *options = DECODED[name]
    case = Case(tmp_path, device, architecture, overrides, (options[0], options[1]))
    served = Served(case.loaded, case.adapters, _decoder)
    assert takes_adapters(served.model)
    _assert_as_peft(case, served)


@pytest.mark.parametrize("name", OTHERS)
def test_transformers_says_what_peft_says_when_kernels_apply_adapters(
    name: str, tmp_path: Path, device: torch.device
) -> None:
    architecture, overrides, *options = OTHERS[name]
    case = Case(tmp_path, device, architecture, overrides, (options[0], options[1]))
    _assert_as_peft(case, Served(case.loaded, case.adapters, _transformers))


@pytest.mark.usefixtures("_without_kernels")
def test_decoder_adds_to_packed_matrices_what_transformers_adds(
    tmp_path: Path, device: torch.device
) -> None:
    case = Case(tmp_path, device, "qwen2", {**ONE_LAYER, **EVEN}, (DORA, SOME))
    config = ModelConfig(str(tmp_path / "model"), str(device), keeps_packed=True, rounding="int4")
    logits = []
    for make_model in (torch_model, _decoder):
        loaded = replace(load_model(config), adapter_limits=LIMITS)
        served = Served(loaded, case.adapters, make_model)
        logits.append(served.last_logits(TEXTS[-2:], NAMES[-2:]))
    assert isinstance(served.model, GpuDecoderModel)
    assert isinstance(served.model._decoder._layers[0].qkv, GpuQuantizedLinear)
    assert difference(*logits) < 10 * TOLERANCE


def test_decoder_keeps_the_bits_of_rows_without_adapter(
    tmp_path: Path, device: torch.device
) -> None:
    case = Case(tmp_path, device, "llama", {}, (ALL, SOME), "bfloat16")
    served = Served(case.loaded, case.adapters, _decoder)
    adapted, plain = (served.last_logits(TEXTS, names) for names in (NAMES, [""] * 4))
    assert torch.equal(adapted[1], plain[1])
    assert not torch.equal(adapted[0], plain[0])


def test_decoder_serves_no_adapters_when_the_executor_has_no_limits(
    tmp_path: Path, device: torch.device
) -> None:
    case = Case(tmp_path, device, "llama", {}, (SOME, SOME))
    assert not takes_adapters(Served(replace(case.loaded, adapter_limits=None), {}, _decoder).model)


@pytest.mark.usefixtures("_without_kernels")
@pytest.mark.parametrize("make_model", [_decoder, _transformers])
def test_decodes_are_replayed_when_rows_have_adapters(
    make_model: MakeModel,
    tmp_path: Path,
    device: torch.device,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = ({**ALL, **HEAD}, DORA)
    case = Case(tmp_path, device, "qwen2", ONE_LAYER, options)
    replays = Replays(device)
    recorded = RecordedModels(make_model, len(TEXTS), make_recorder=lambda: replays)
    served = Served(case.loaded, case.adapters, recorded.make)
    replays.count = 0

    served.last_logits(TEXTS, NAMES)
    assert replays.count == 1  # prompts are not
    _assert_as_peft(case, served)
    # Others take their places.
    served.adapters = {"a@1": case.adapters["b@2"], "b@2": case.adapters["a@1"]}
    swapped = served.last_logits(TEXTS[:1], ["b@2"]).cpu()

    assert difference(case.expected(TEXTS[0], "a@1"), swapped[0]) < TOLERANCE
    assert not [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.usefixtures("_without_kernels")
@pytest.mark.parametrize("make_model", [_decoder, _transformers])
def test_decodes_are_not_replayed_when_an_adapter_changes_more_than_linear_layers(
    make_model: MakeModel, tmp_path: Path, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(tmp_path, device, "llama", ONE_LAYER, HEADS)
    replays = Replays(device)
    recorded = RecordedModels(make_model, len(TEXTS), make_recorder=lambda: replays)
    served = Served(case.loaded, case.adapters, recorded.make)
    replays.count = 0

    for _ in range(2):
        served.last_logits(TEXTS[:1], ["a@1"])
    assert replays.count == 0
    assert [message.split()[0] for message in caplog.messages].count("adapters_unrecorded") == 1
    _assert_as_peft(case, served)


@pytest.mark.usefixtures("_without_kernels")
def test_rows_with_adapters_get_the_tokens_of_turns_when_they_run_on(
    tmp_path: Path, device: torch.device
) -> None:
    case = Case(tmp_path, device, "llama", ONE_LAYER, (ALL, SOME))
    recorded = RecordedModels(
        _transformers, 4, static_draw=SortingDraw(), make_recorder=lambda: Replays(device)
    )
    tables = [[4 * row + block for block in range(4)] for row in range(4)]
    rows = [Row([5 + row], 3, tables[row], 1, adapter=NAMES[row], seed=row) for row in range(4)]
    plain = [replace(row, adapter="") for row in rows]
    num_run_on = (6, 0, 5, 3)
    adapted, unadapted = (
        _run_on(_runner(case, recorded.make), each, num_run_on) for each in (rows, plain)
    )
    assert adapted == _turns(_runner(case, _transformers), rows, num_run_on)
    assert unadapted == _turns(_runner(case, _transformers), plain, num_run_on)
    assert adapted != unadapted


def _runner(case: Case, make_model: MakeModel) -> ModelRunner:
    """A runner whose pools have the same random numbers each time."""
    runner = build_runner(case.loaded, CacheConfig(4, 16, num_host_blocks=0), make_model)
    runner.adapters.by_name = case.adapters
    for pool in (*runner.cache.key_pools, *runner.cache.value_pools):
        generator = torch.Generator().manual_seed(1)
        pool.copy_(torch.randn(pool.shape, generator=generator))
    return runner


def _run_on(runner: ModelRunner, rows: Sequence[Row], num_run_on: Sequence[int]) -> list[list[int]]:
    """Tokens of a step whose rows run on."""
    step = replace(make_step(rows), num_run_on_tokens=np.array(num_run_on, np.int32))
    output = runner.execute(step)
    return [output.token_ids_of(row) for row in range(len(rows))]


def _turns(runner: ModelRunner, rows: Sequence[Row], num_run_on: Sequence[int]) -> list[list[int]]:
    """The same tokens, of a step for each."""
    tokens: list[list[int]] = [[] for _ in rows]
    for turn in range(max(num_run_on) + 1):
        step = make_step(
            [
                replace(row, tokens=found[-1:] or row.tokens, num_computed=row.num_computed + turn)
                for row, found in zip(rows, tokens, strict=True)
            ]
        )
        output = runner.execute(step)
        for row, found in enumerate(tokens):
            found += output.token_ids_of(row)
    return [found[: most + 1] for found, most in zip(tokens, num_run_on, strict=True)]


def test_kernels_of_all_layers_are_compiled_before_the_first_adapter(
    tmp_path: Path, device: torch.device
) -> None:
    case = Case(tmp_path, device, "llama", ONE_LAYER, (SOME, SOME))
    seen: list[tuple[int, ...]] = []

    def add(
        x: Tensor, output: Tensor, tiles: TokenTiles, linear: SlotLinear, bias: Tensor | None
    ) -> None:
        assert tiles.tiles[2].tolist() == [1]
        seen.append(linear.sizes)

    def make_model(loaded: LoadedModel, cache: KVCache) -> PagedModel:
        decoder = GpuDecoder(loaded, ATTENTION)
        return GpuDecoderModel(decoder, cache, decoder_slots(loaded, lambda: add))

    runner = build_runner(case.loaded, CacheConfig(4, 16, num_host_blocks=0), make_model)
    compile_kernels(runner, case.loaded, 2, 4)

    sizes = {
        name.rpartition(".")[2]: t.num_outputs for name, t in case.loaded.adapter_targets.items()
    }
    fused = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
    expected = [tuple(sizes[name] for name in names) for names in (*fused, ("lm_head",))]
    assert seen == expected
    assert not runner.adapters.by_name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_try_low_rank_passes_when_kernels_are_right(
    dtype: torch.dtype, device: torch.device
) -> None:
    try_low_rank(add_low_rank, dtype, device)


def _of_one_token_more(
    x: Tensor, output: Tensor, tiles: TokenTiles, linear: SlotLinear, bias: Tensor | None
) -> None:
    add_low_rank(x, output, tiles, linear, bias)
    output[0] += 1


def _without_bias(
    x: Tensor, output: Tensor, tiles: TokenTiles, linear: SlotLinear, _bias: Tensor | None
) -> None:
    add_low_rank(x, output, tiles, linear)


def _of_other_tokens(
    x: Tensor, output: Tensor, tiles: TokenTiles, linear: SlotLinear, bias: Tensor | None
) -> None:
    add_low_rank(x.roll(1, 0), output, tiles, linear, bias)


@pytest.mark.parametrize(
    ("add", "reason"),
    [
        (_of_one_token_more, "tokens without an adapter have changed"),
        (_without_bias, "updates of adapters are off by"),
        (_of_other_tokens, "updates of adapters are off by"),
    ],
)
def test_try_low_rank_raises_when_something_else_is_added(
    add: AddLowRank, reason: str, device: torch.device
) -> None:
    with pytest.raises(TrialFailed, match=reason):
        try_low_rank(add, torch.float32, device)
