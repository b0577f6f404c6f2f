from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.device.kv_cache import KVCache
from executor_service.errors import ModelUnsupported
from executor_service.model.input_batch import build_input_batch
from executor_service.model.paged_model import TransformersModel
from executor_service.model.transformers_attention import (
    IMPLEMENTATION_NAME,
    bind,
    register_attention,
    unbind,
)
from splitserve_kernels.paged_batch import AttentionOptions
from tests.support.devices.recorded_ops import RecordedOps
from tests.support.models.tiny_models import make_tiny_model
from tests.support.steps.step_driver import Row, make_step


class _Context:
    """Gives back the values; remembers the options."""

    options: AttentionOptions

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        self.options = options
        return value


def _attend(**kwargs: object) -> AttentionOptions:
    register_attention()
    module, context = nn.Identity(), _Context()
    bind([module], context)
    heads = torch.arange(24.0).view(1, 2, 3, 4)
    mask = kwargs.pop("attention_mask", None)
    attend = ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION_NAME]
    output, weights = attend(module, heads, heads, heads, mask, **kwargs)
    assert weights is None
    assert torch.equal(output, heads.transpose(1, 2))
    return context.options


def test_attention_passes_options_on_when_the_model_gives_them() -> None:
    sinks = torch.ones(2)
    options = _attend(
        scaling=0.5, sliding_window=7, softcap=30.0, s_aux=sinks, dropout=0.0, position_ids=sinks
    )
    assert (options.scale, options.sliding_window, options.softcap) == (0.5, 7, 30.0)
    assert options.sinks is sinks


def test_attention_scales_by_head_size_when_the_model_does_not_say() -> None:
    assert _attend().scale == 0.5


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"attention_mask": torch.ones(1)}, "mask of its own"),
        ({"is_causal": False}, "not causal"),
        ({"position_bias": torch.ones(1)}, "'position_bias'"),
        ({"indices": torch.ones(1)}, "'indices'"),
    ],
)
def test_attention_refuses_when_an_argument_would_change_the_result(
    kwargs: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelUnsupported, match=reason):
        _attend(**kwargs)


def test_unbind_forgets_the_context_when_it_is_there() -> None:
    module = nn.Identity()
    before = set(vars(module))
    bind([module], _Context())
    unbind([module, nn.Identity()])
    assert set(vars(module)) == before


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi3"])
def test_forward_pass_asks_the_device_nothing_when_rows_begin_in_its_middle(
    architecture: str, tmp_path: Path
) -> None:
    """A mask that says where rows begin would have to know; a recording refuses to."""
    directory = make_tiny_model(architecture, tmp_path)
    loaded = load_model(ModelConfig(str(directory), max_model_len=48))
    cache = KVCache(loaded.layers, 16, 4, 0, loaded.dtype, loaded.device)
    step = make_step([Row([5, 6, 7], 0, [0], 3), Row([8, 9], 2, [1], 4), Row([7], 9, [2], 1)])
    batch = build_input_batch(step, [0, 1, 2], 16, loaded.device)
    model = TransformersModel(loaded, cache, _Queries())
    recorder = RecordedOps()
    with torch.inference_mode():
        recorder.record(lambda: _assert_rows(model.logits(batch)))
    assert recorder.num_recorded == 1


def _assert_rows(logits: Tensor) -> None:
    assert logits.shape[0] == 3


class _Queries:
    """A backend that attends to nothing: how long rows are it need not know."""

    def write_kv(self, *_arguments: object) -> None:
        pass

    def paged_attention(self, query: Tensor, *_arguments: object) -> Tensor:
        return query
