from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from executor_service.backends import AUTO, NATIVE, TORCH, Compute, choose_compute
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.decoders import PackedLinearModule
from executor_service.errors import BackendUnavailable
from executor_service.model import LoadedModel
from splitserve_kernels.cpu import NativeAttention, NativeLibrary
from splitserve_kernels.cpu.build import BuildFailed
from tests.support.models.model_pair import served_logits
from tests.support.models.tiny_models import make_tiny_model

BLOCK_SIZE = 8
PROMPT = [(11 * i + 5) % 90 for i in range(45)]
LOGIT_TOLERANCE = 1e-4
_COMMON: Mapping[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
# Made of other parts than a Llama.
_OTHERS = ("GPTNeoXConfig", "OPTConfig", "GemmaConfig")
# Of the parts of a Llama, which computes something else with them.
_LOOKALIKES = ("GraniteConfig", "SmolLM3Config")
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "OPTConfig": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "GemmaConfig": {"head_dim": 16},
    "GraniteConfig": {"residual_multiplier": 0.3, "embedding_multiplier": 3.0},
    "SmolLM3Config": {"no_rope_layer_interval": 2},
}
Load = Callable[..., LoadedModel]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Loads a random model by the name of its configuration's class."""
    directories: dict[str, Path] = {}

    def get(config_class: str, dtype: str = "float32") -> LoadedModel:
        if config_class not in directories:
            directories[config_class] = tmp_path_factory.mktemp(config_class)
            _save(config_class, directories[config_class])
        return load_model(ModelConfig(str(directories[config_class]), dtype=dtype))

    return get


def _save(config_class: str, directory: Path) -> None:
    import transformers

    # One that has other names for these sizes takes them for unknown attributes.
    config = getattr(transformers, config_class)(**{**_COMMON, **_OPTIONS.get(config_class, {})})
    auto: Any = transformers.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        auto.from_config(config).save_pretrained(directory)


class _Loads:
    """Loads a model and counts how often."""

    def __init__(self, load: Load, config_class: str) -> None:
        self._load, self._config_class, self.count = load, config_class, 0

    def __call__(self) -> LoadedModel:
        self.count += 1
        return self._load(self._config_class)


def _logits(compute: Compute) -> torch.Tensor:
    return served_logits(compute.loaded, compute.make_model, PROMPT, BLOCK_SIZE, ends=[20])


def _assert_same_logits(
    compute: Compute, expected: Compute, tolerance: float = LOGIT_TOLERANCE
) -> None:
    torch.testing.assert_close(_logits(compute), _logits(expected), atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", [AUTO, NATIVE])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_choose_compute_takes_the_native_decoder_for_a_llama(
    load: Load, native_library: NativeLibrary, name: str, dtype: str
) -> None:
    compute = choose_compute(lambda: load("LlamaConfig", dtype), name, BLOCK_SIZE)
    assert compute.description == f"native decoder ({native_library.variant})"
    in_torch = choose_compute(lambda: load("LlamaConfig", dtype), TORCH, BLOCK_SIZE)
    assert in_torch.description == "torch"
    if dtype == "float32":
        _assert_same_logits(compute, in_torch)


@pytest.mark.parametrize(
    ("config_class", "name"),
    [
        *((each, AUTO) for each in (*_OTHERS, *_LOOKALIKES)),
        *((each, NATIVE) for each in _LOOKALIKES),
    ],
)
def test_choose_compute_takes_native_attention_when_the_model_is_no_llama(
    load: Load,
    native_library: NativeLibrary,
    caplog: pytest.LogCaptureFixture,
    config_class: str,
    name: str,
) -> None:
    caplog.set_level(logging.INFO, "executor_service")
    loads = _Loads(load, config_class)
    compute = choose_compute(loads, name, BLOCK_SIZE)
    assert compute.description == f"native attention and matrices ({native_library.variant})"
    refusals = [r for r in caplog.records if "native_decoder" in r.getMessage()]
    assert [record.levelno for record in refusals] == [logging.INFO]
    assert loads.count == 1
    _assert_same_logits(compute, choose_compute(loads, TORCH, BLOCK_SIZE))


def _round_matrices(loaded: LoadedModel) -> LoadedModel:
    """Rounds the weights of matrices to 127 steps to either side of 0 for each output."""
    for module in loaded.model.modules():
        if isinstance(module, torch.nn.Linear):
            factor = 127 / module.weight.detach().abs().amax(dim=1, keepdim=True)
            module.weight.data = torch.round(module.weight.detach() * factor) / factor
    return loaded


@pytest.mark.cases(4)
@pytest.mark.parametrize("config_class", ["LlamaConfig", *_OTHERS, *_LOOKALIKES])
def test_choose_compute_serves_rounded_weights_when_int8_was_asked(
    load: Load, native_library: NativeLibrary, config_class: str
) -> None:
    compute = choose_compute(lambda: load(config_class), AUTO, BLOCK_SIZE, is_int8=True)
    rounded = choose_compute(lambda: _round_matrices(load(config_class)), TORCH, BLOCK_SIZE)
    # Scales are multiplied with sums here and with weights there.
    _assert_same_logits(compute, rounded, tolerance=1e-3)


def test_choose_compute_warns_when_int8_rounds_weights_that_were_quantised(
    load: Load, native_library: NativeLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = replace(load("LlamaConfig"), quantization="awq")
    compute = choose_compute(lambda: loaded, AUTO, BLOCK_SIZE, is_int8=True)
    assert compute.is_int8
    assert [text for text in _warnings(caplog) if "weights_rounded_again format=awq" in text]


def test_choose_compute_raises_when_int8_was_asked_and_torch_computes(load: Load) -> None:
    with pytest.raises(BackendUnavailable, match=r"quantization int8: LlamaForCausalLM runs with"):
        choose_compute(lambda: load("LlamaConfig"), TORCH, BLOCK_SIZE, is_int8=True)


def test_choose_compute_keeps_matrices_in_torch_when_packed_ones_are_wrong(
    load: Load,
    native_library: NativeLibrary,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    forward = PackedLinearModule.forward
    monkeypatch.setattr(PackedLinearModule, "forward", lambda self, rows: forward(self, rows) * 2)
    loads = _Loads(load, "OPTConfig")
    compute = choose_compute(loads, AUTO, BLOCK_SIZE)
    assert compute.description == f"native attention ({native_library.variant})"
    assert [r.levelno for r in caplog.records if "packed_matrices_refused" in r.getMessage()] == [
        logging.ERROR
    ]
    assert loads.count == 2
    _assert_same_logits(compute, choose_compute(loads, TORCH, BLOCK_SIZE))
    with pytest.raises(BackendUnavailable, match="quantization int8"):
        choose_compute(loads, AUTO, BLOCK_SIZE, is_int8=True)


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def _with_fields(loaded: LoadedModel, fields: Mapping[str, object]) -> LoadedModel:
    for name, setting in fields.items():
        setattr(loaded.model.config, name, setting)
    return loaded


def test_choose_compute_takes_the_native_decoder_when_unknown_fields_change_nothing(
    load: Load, native_library: NativeLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    stray = {"some_factor": 0.9, "some_name": "x", "unk_token_id": 3}
    compute = choose_compute(
        lambda: _with_fields(load("LlamaConfig"), stray), AUTO, BLOCK_SIZE, is_deterministic=True
    )
    assert compute.description == f"native decoder ({native_library.variant})"
    assert (compute.why_slow, _warnings(caplog)) == (None, [])


@pytest.mark.usefixtures("native_library")
def test_choose_compute_warns_of_unknown_fields_when_the_decoder_is_wrong(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward: Any = LlamaForCausalLM.forward

    @wraps(forward)
    def scaled(self: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        output = forward(self, *arguments, **named)
        output.logits *= 0.99
        return output

    def load_scaled() -> LoadedModel:
        return _with_fields(load("LlamaConfig"), {"logit_scale": 0.99})

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    compute = choose_compute(load_scaled, AUTO, BLOCK_SIZE)
    assert compute.description.startswith("native attention and matrices")
    (warning,) = _warnings(caplog)
    assert warning.startswith("native_decoder_refused model=LlamaForCausalLM reason=")
    assert "unknown configuration fields: logit_scale = 0.99" in warning
    assert "price='a step takes about 2.5 times as long" in warning
    assert str(compute.why_slow) in warning
    assert not [r for r in caplog.records if r.levelno > logging.WARNING]
    with pytest.raises(BackendUnavailable, match=r"deterministic: .*: logit_scale = 0\.99"):
        choose_compute(load_scaled, AUTO, BLOCK_SIZE, is_deterministic=True)


def _fail_to_build() -> NativeLibrary:
    raise BuildFailed("no C++ compiler")


def test_choose_compute_warns_and_takes_torch_when_there_is_no_compiler(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("executor_service.backends.choose.load_library", _fail_to_build)
    loads = _Loads(load, "LlamaConfig")
    compute = choose_compute(loads, AUTO, BLOCK_SIZE)
    assert (compute.description, loads.count) == ("torch", 1)
    assert compute.why_slow == "no C++ compiler"
    (warning,) = _warnings(caplog)
    assert "reason='no C++ compiler' price='a step takes 2.5 times" in warning
    assert _logits(compute).isfinite().all()
    with pytest.raises(BackendUnavailable, match="native: no C\\+\\+ compiler"):
        choose_compute(loads, NATIVE, BLOCK_SIZE)


class _Nonsense(NativeAttention):
    def paged_attention(self, *arguments: Any, **options: Any) -> torch.Tensor:  # noqa: ANN401
        return super().paged_attention(*arguments, **options) + 0.01


@pytest.mark.usefixtures("native_library")
def test_choose_compute_takes_torch_when_the_backend_is_wrong(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("executor_service.backends.choose.NativeAttention", _Nonsense)
    compute = choose_compute(lambda: load("LlamaConfig"), AUTO, BLOCK_SIZE)
    assert compute.description == "torch"
    (error,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert "differs by 0.01 from the reference" in error
    with pytest.raises(BackendUnavailable, match=r"native: the output differs by 0\.01 "):
        choose_compute(lambda: load("LlamaConfig"), NATIVE, BLOCK_SIZE)


@pytest.mark.parametrize(("is_exact", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_choose_compute_takes_the_native_decoder_when_the_checkpoint_is_float16(
    tmp_path: Path,
    native_library: NativeLibrary,
    caplog: pytest.LogCaptureFixture,
    is_exact: bool,
    dtype: str,
) -> None:
    caplog.set_level(logging.INFO, "executor_service")
    _save_float16(tmp_path, is_exact=is_exact)
    config = ModelConfig(str(tmp_path))
    compute = choose_compute(lambda: load_model(config), AUTO, BLOCK_SIZE, is_deterministic=True)
    assert compute.description == f"native decoder ({native_library.variant})"
    assert (compute.loaded.dtype_name, compute.why_slow) == (dtype, None)
    assert caplog.text.count(f"float16_computed_in_{dtype}") == 1
    assert _warnings(caplog) == []
    if dtype == "float32":
        # The weights are the same numbers.
        exact = ModelConfig(str(tmp_path), dtype="float32")
        _assert_same_logits(compute, choose_compute(lambda: load_model(exact), TORCH, BLOCK_SIZE))


def test_load_model_rounds_float16_and_warns_when_float32_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _save_float16(tmp_path, is_exact=False)
    monkeypatch.setattr(
        "executor_service.checkpoint.model_loader.available_host_bytes", lambda: 10_000
    )
    assert load_model(ModelConfig(str(tmp_path))).dtype_name == "bfloat16"
    (warning,) = _warnings(caplog)
    assert "weights lose 3 of 11 bits; float32 needs" in warning


def _save_float16(directory: Path, *, is_exact: bool) -> None:
    make_tiny_model("llama", directory)
    path = directory / "model.safetensors"
    tensors = {name: tensor.half() for name, tensor in load_file(path).items()}
    if is_exact:
        tensors = {name: tensor.bfloat16().half() for name, tensor in tensors.items()}
    save_file(tensors, path, {"format": "pt"})
    settings = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**settings, "dtype": "float16"}))


def test_choose_compute_warns_and_takes_torch_when_the_model_is_float16(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    compute = choose_compute(lambda: load("LlamaConfig", "float16"), AUTO, BLOCK_SIZE)
    assert compute.description == "torch"
    assert compute.why_slow == "torch.float16; allowed: float32, bfloat16"
    (warning,) = _warnings(caplog)
    assert "torch.float16" in warning
    assert "price='a step takes 2.5 times" in warning
    with pytest.raises(BackendUnavailable, match=r"native: torch\.float16"):
        choose_compute(lambda: load("LlamaConfig", "float16"), NATIVE, BLOCK_SIZE)
