from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from executor_service.errors import ModelUnsupported
from executor_service.model.transformers_attention import (
    IMPLEMENTATION_NAME,
    bind,
    register_attention,
    unbind,
)
from splitserve_kernels.paged_batch import AttentionOptions


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
