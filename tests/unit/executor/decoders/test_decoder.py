"""The native decoder: what its trial finds, and how it takes over a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.llama import modeling_llama

from executor_service.checkpoint import ModelConfig, load_model
from executor_service.decoders import (
    NativeModel,
    NativePagedModel,
    build_native_model,
    unknown_fields,
    why_not_native,
)
from executor_service.device import HostStreams, KVCache, Uploads
from executor_service.errors import TrialFailed
from executor_service.model import InputBatch, LoadedModel
from executor_service.runner import ForwardPass, PassBatches
from splitserve_kernels.cpu import NativeLibrary, operations
from tests.support.models.tiny_models import load_tiny_model
from tests.support.steps.step_driver import Row, make_step

# As gentle as real weights: what is wrong is smaller than the noise of bfloat16.
GENTLE: Mapping[str, Any] = {"initializer_range": 0.02}


@pytest.fixture
def _any_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "executor_service.decoders.llama_config.why_not_llama_config", lambda _: None
    )


def _load_gentle(
    directory: Path,
    architecture: str,
    dtype: str,
    **overrides: Any,  # noqa: ANN401
) -> LoadedModel:
    return load_tiny_model(architecture, directory, dtype, seed=1, **{**GENTLE, **overrides})


@pytest.mark.cases(5)
@pytest.mark.usefixtures("_any_configuration")
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("architecture", ["ministral3", "smollm3", "granite"])
def test_build_native_model_raises_when_only_the_parts_are_a_llamas(
    tmp_path: Path, native_library: NativeLibrary, architecture: str, dtype: str, is_int8: bool
) -> None:
    loaded = _load_gentle(tmp_path, architecture, dtype)
    with pytest.raises(TrialFailed, match=r"relative error .* in float32"):
        build_native_model(loaded, native_library, is_int8=is_int8)


@pytest.mark.parametrize("boundary", [3001, 8187])
@pytest.mark.parametrize("is_int8", [False, True])
def test_build_native_model_raises_when_far_positions_differ(
    tmp_path: Path, native_library: NativeLibrary, boundary: int, is_int8: bool
) -> None:
    loaded = _load_gentle(tmp_path, "llama", "bfloat16", max_position_embeddings=8192)
    model: Any = loaded.model
    model.config.what_comes_tomorrow = {"from": float(boundary)}
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(_ScaledFrom(boundary), with_kwargs=True)
    with pytest.raises(TrialFailed, match=r"relative error .* in float32"):
        build_native_model(loaded, native_library, is_int8=is_int8)


class _ScaledFrom:
    """Scales what a layer attends with by a hair, from a position on."""

    def __init__(self, boundary: int) -> None:
        self._boundary = boundary

    def __call__(self, _module: Any, args: Any, kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        is_far: Tensor = kwargs["position_ids"] >= self._boundary
        factors = torch.where(is_far, 1.05, 1.0)[..., None]
        states = kwargs["hidden_states"]
        return args, {**kwargs, "hidden_states": states * factors.to(states.dtype)}


# Fields that change no logit of a Llama, in forms that fields which matter have, too.
STRAY: Mapping[str, Any] = {
    "some_factor": 0.95,
    "some_switch": False,
    "some_layers": [1, 0],
    "some_window": 90,
    "some_large_window": 7000,
    "some_name": "x",
    "some_part": {"from": 3000, "factors": [0.5, 2.0]},
}


def test_build_native_model_passes_when_unknown_fields_change_nothing(
    tmp_path: Path, native_library: NativeLibrary
) -> None:
    loaded = _load_gentle(tmp_path, "llama", "bfloat16", max_position_embeddings=8192, **STRAY)
    assert unknown_fields(vars(loaded.model.config)) == STRAY
    build_native_model(loaded, native_library)


def _scale_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    forward: Any = LlamaForCausalLM.forward

    @wraps(forward)
    def scaled(self: Any, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        output = forward(self, *arguments, **options)
        output.logits *= self.config.logit_scale
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)


def _multiply_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    initialise: Any = modeling_llama.LlamaDecoderLayer.__init__
    forward: Any = modeling_llama.LlamaMLP.forward

    def initialise_scaled(self: Any, config: Any, layer_idx: int) -> None:  # noqa: ANN401
        initialise(self, config, layer_idx)
        self.mlp.residual_multiplier = config.residual_multiplier

    def scaled(self: Any, states: Tensor) -> Any:  # noqa: ANN401
        return forward(self, states) * self.residual_multiplier

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "__init__", initialise_scaled)
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", scaled)


def _narrow_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a window come from a field of another name, by mask only."""

    def sliding_mask(config: Any, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        named = copy.copy(config)
        named.sliding_window = config.local_attention
        return create_sliding_window_causal_mask(named, *arguments, **options)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", sliding_mask)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("change", "setting", "reason"),
    [
        (_scale_logits, {"logit_scale": 0.99}, "relative error .* in float32"),
        (_multiply_residual, {"residual_multiplier": 0.95}, "relative error .* in float32"),
        (_narrow_mask, {"local_attention": 90}, "relative error .* in float32"),
        (_narrow_mask, {"local_attention": 7000}, "its code reads local_attention = 7000"),
    ],
)
def test_build_native_model_raises_when_an_unknown_field_changes_logits(
    tmp_path: Path,
    native_library: NativeLibrary,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch], None],
    setting: Mapping[str, Any],
    reason: str,
    dtype: str,
) -> None:
    change(monkeypatch)
    loaded = _load_gentle(tmp_path, "llama", dtype, max_position_embeddings=8192, **setting)
    assert why_not_native(loaded) is None
    with pytest.raises(TrialFailed, match=reason):
        build_native_model(loaded, native_library)


def test_build_native_model_passes_when_angles_hold_an_unknown_factor(
    tmp_path: Path, native_library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoder takes its angles from the model, whatever they depend on."""
    rotary: Any = modeling_llama.LlamaRotaryEmbedding
    forward = rotary.forward

    def bent(self: Any, states: Tensor, position_ids: Tensor) -> Any:  # noqa: ANN401
        factor = self.config.rope_parameters["bend"]
        cosines, sines = forward(self, states, position_ids)
        is_far = (position_ids >= 4000)[..., None]
        return torch.where(is_far, cosines * factor, cosines), sines

    monkeypatch.setattr(rotary, "forward", bent)
    ropes = {"rope_type": "default", "rope_theta": 1e4, "bend": 0.9}
    overrides = {"max_position_embeddings": 8192, "rope_parameters": ropes}
    loaded = _load_gentle(tmp_path, "llama", "bfloat16", **overrides)
    assert unknown_fields(vars(loaded.model.config)) == {"rope_parameters.bend": 0.9}
    build_native_model(loaded, native_library)


@pytest.mark.cases(8)
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", {"max_position_embeddings": 100_000, "vocab_size": 3000}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": 300}),
        ("cwm", {}),
        ("seed_oss", {}),
    ],
)
def test_build_native_model_passes_when_the_decoder_computes_the_model(
    tmp_path: Path,
    native_library: NativeLibrary,
    architecture: str,
    overrides: Mapping[str, Any],
    dtype: str,
    is_int8: bool,
) -> None:
    build_native_model(
        _load_gentle(tmp_path, architecture, dtype, **overrides), native_library, is_int8=is_int8
    )


def test_build_native_model_raises_when_windows_are_not_applied(
    tmp_path: Path, native_library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window so large that no probe of the whole model passes its end."""
    loaded = _load_gentle(tmp_path, "mistral", "bfloat16", sliding_window=300)
    monkeypatch.setattr(LoadedModel, "layer_windows", property(lambda self: [None] * 2))
    with pytest.raises(TrialFailed, match=r"relative error .* in float32"):
        build_native_model(loaded, native_library)


def test_build_native_model_raises_when_int8_weights_are_scaled_wrongly(
    tmp_path: Path, native_library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pack_wrongly(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        packed = operations.pack(*arguments, **options)
        if packed.scales is not None:
            packed.scales.mul_(1.01)
        return packed

    monkeypatch.setattr("splitserve_kernels.cpu.decoder.pack", pack_wrongly)
    with pytest.raises(TrialFailed, match=r"relative error .* in float32"):
        build_native_model(
            _load_gentle(tmp_path, "llama", "bfloat16"), native_library, is_int8=True
        )


PROMPTS = ([5, 6, 7], [9, 8, 7, 6], [50, 3])


def _load(directory: Path, architecture: str = "llama", **overrides: Any) -> LoadedModel:  # noqa: ANN401
    return load_tiny_model(architecture, directory, seed=1, **overrides)


@pytest.mark.parametrize(
    ("architecture", "overrides", "reason"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, None),
        ("gpt_neox", {}, "GPTNeoXForCausalLM is not a supported Llama class"),
        ("llama", {"intermediate_size": 97}, "a matrix has an odd number of inputs"),
    ],
)
def test_why_not_native_names_what_is_not_a_llama(
    tmp_path: Path, architecture: str, overrides: Mapping[str, Any], reason: str | None
) -> None:
    assert why_not_native(_load(tmp_path, architecture, **overrides)) == reason


def test_build_native_model_raises_when_the_replacement_computes_something_else(
    tmp_path: Path, native_library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = NativeModel.run

    def run_wrongly(self: NativeModel, input_ids: torch.Tensor, *rest: Any) -> torch.Tensor:  # noqa: ANN401
        return run(self, input_ids + 1, *rest)

    monkeypatch.setattr(NativeModel, "run", run_wrongly)
    with pytest.raises(TrialFailed, match="relative error of the logits"):
        build_native_model(_load(tmp_path), native_library)


def test_build_native_model_holds_weights_once_when_it_is_done(
    tmp_path: Path, native_library: NativeLibrary
) -> None:
    loaded = _load(tmp_path)
    build_native_model(loaded, native_library)
    kept = {name for name, parameter in loaded.model.named_parameters() if parameter.numel()}
    assert not kept


def test_build_native_model_runs_no_model_that_loading_has_probed(
    tmp_path: Path, native_library: NativeLibrary
) -> None:
    loaded = _load(tmp_path)
    called: list[object] = []
    loaded.model.register_forward_pre_hook(lambda model, _: called.append(model))
    build_native_model(loaded, native_library)
    # A few of its layers are, in float32.
    assert loaded.model not in called


class _FailingTogether:
    """A native model that raises for more than one row."""

    def __init__(self, model: NativePagedModel) -> None:
        self._model = model

    def logits(self, batch: InputBatch) -> torch.Tensor:
        if batch.paged.num_rows > 1:
            raise ValueError("asked for")
        return self._model.logits(batch)


@torch.inference_mode()
def test_forward_pass_keeps_logits_when_it_repeats_rows_one_by_one(
    tmp_path: Path, native_library: NativeLibrary
) -> None:
    loaded = _load(tmp_path)
    native = build_native_model(loaded, native_library)
    cache = KVCache(loaded.layers, 16, len(PROMPTS), 0, loaded.dtype, loaded.device)
    model = NativePagedModel(native, cache)
    step = make_step([Row(p, 0, (block,), len(p)) for block, p in enumerate(PROMPTS)])
    batches = PassBatches(loaded, cache, Uploads(loaded.device, HostStreams()))
    expected = ForwardPass(loaded, cache, model, batches).run(step).sampling_logits.clone()
    result = ForwardPass(loaded, cache, _FailingTogether(model), batches).run(step)
    assert result.readout.sampling_rows.tolist() == np.arange(len(PROMPTS)).tolist()
    assert torch.equal(result.sampling_logits, expected)


@torch.inference_mode()
def test_rotation_is_that_of_the_model_when_it_is_dynamic(
    tmp_path: Path, native_library: NativeLibrary
) -> None:
    """By default it is served up to its original length, where its angles do not change yet."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    options: Mapping[str, Any] = {"max_position_embeddings": 5000, "rope_parameters": rope}
    model: Any = _load(tmp_path, **options).model
    native = build_native_model(load_model(ModelConfig(str(tmp_path))), native_library)
    positions = torch.tensor([4, 4095, 4096, 4999])
    cosines, sines = model.model.rotary_emb(torch.zeros(1), positions[None])
    half = cosines.shape[-1] // 2
    actual = native._rotation_up_to(5000)
    torch.testing.assert_close(actual[0][positions], cosines[0, :, :half])
    torch.testing.assert_close(actual[1][positions], sines[0, :, :half])


@torch.inference_mode()
def test_rotation_grows_when_positions_are_beyond_its_table(
    tmp_path: Path, native_library: NativeLibrary
) -> None:
    loaded = _load(tmp_path, max_position_embeddings=20_000)
    model: Any = loaded.model
    native = build_native_model(loaded, native_library)
    for last in (10, 4095, 4096, 19_999, 5000):
        positions = torch.tensor([last, 3, last // 2])
        cosines, _ = model.model.rotary_emb(torch.zeros(1), positions[None])
        half = cosines.shape[-1] // 2
        actual, _ = native._rotation_up_to(last + 1)
        torch.testing.assert_close(actual[positions], cosines[0, :, :half])
