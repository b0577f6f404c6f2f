from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.decoders.cpu_decoder import NativeModel, build_native_model, why_not_native
from executor_service.decoders.decoder import DecoderModel
from executor_service.device.kv_cache import KVCache
from executor_service.device.streams import HostStreams
from executor_service.device.uploads import Uploads
from executor_service.errors import TrialFailed
from executor_service.model.input_batch import InputBatch
from executor_service.model.loaded_model import LoadedModel
from executor_service.runner.forward_pass import ForwardPass, PassBatches
from splitserve_kernels.cpu.library import NativeLibrary
from tests.support.models.tiny_models import make_tiny_model
from tests.support.steps.step_driver import Row, make_step

PROMPTS = ([5, 6, 7], [9, 8, 7, 6], [50, 3])


def _load(directory: Path, architecture: str = "llama", **overrides: Any) -> LoadedModel:  # noqa: ANN401
    make_tiny_model(architecture, directory, seed=1, overrides=overrides)
    return load_model(ModelConfig(str(directory)))


@pytest.mark.parametrize(
    ("architecture", "overrides", "reason"),
    [
        ("llama", {}, None),
        ("llama", {"attention_bias": True, "mlp_bias": True}, None),
        ("qwen3", {}, None),
        (
            "llama",
            {"hidden_act": "gelu"},
            "hidden_act is 'gelu', which is not understood",
        ),
        ("gpt_neox", {}, "GPTNeoXForCausalLM is no class that is known to compute a Llama"),
        ("qwen3_moe", {}, "Qwen3MoeForCausalLM is no class that is known to compute a Llama"),
        ("llama", {"intermediate_size": 97}, "a matrix has an odd number of inputs"),
    ],
)
def test_why_not_native_names_what_is_different_when_a_model_is_no_llama(
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


def test_build_native_model_does_not_run_the_model_again_when_loading_has_probed_it(
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

    def __init__(self, model: DecoderModel) -> None:
        self._model = model

    def logits(self, batch: InputBatch) -> torch.Tensor:
        if batch.paged.num_rows > 1:
            raise ValueError("asked for")
        return self._model.logits(batch)


@torch.inference_mode()
def test_forward_pass_keeps_every_rows_logits_when_it_repeats_them_one_by_one(
    tmp_path: Path, native_library: NativeLibrary
) -> None:
    loaded = _load(tmp_path)
    native = build_native_model(loaded, native_library)
    cache = KVCache(loaded.layers, 16, len(PROMPTS), 0, loaded.dtype, loaded.device)
    model = DecoderModel(native, cache)
    step = make_step([Row(p, 0, (block,), len(p)) for block, p in enumerate(PROMPTS)])
    batches = PassBatches(loaded, cache, Uploads(loaded.device, HostStreams()))
    expected = ForwardPass(loaded, cache, model, batches).run(step).sampling_logits.clone()
    result = ForwardPass(loaded, cache, _FailingTogether(model), batches).run(step)
    assert result.readout.sampling_rows.tolist() == np.arange(len(PROMPTS)).tolist()
    assert torch.equal(result.sampling_logits, expected)


@torch.inference_mode()
def test_rotation_is_that_of_the_model_when_it_depends_on_the_longest_position(
    tmp_path: Path, native_library: NativeLibrary
) -> None:
    """Such a model is served up to its original length, where its angles do not change yet."""
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
