"""The last judge at load: does a model say the same through paged attention as by itself?

Two random sequences go through the model as `transformers` runs it, and then in uneven parts
through paged attention. Whatever a model does that its configuration did not tell (state outside
attention, a mask of its own, positions from elsewhere) shows as a difference.

Shape letters: Q probe sequences, L tokens of each, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from executor_service.attention import IMPLEMENTATION_NAME, register_attention
from executor_service.attention_probe import probe_attention
from executor_service.checkpoint import one_line
from executor_service.device_errors import is_out_of_memory
from executor_service.errors import ModelUnsupported, OutOfMemory
from executor_service.kv_cache import LayerShape
from executor_service.loaded_model import LoadedModel, Probe
from executor_service.model_support import expected_windows
from splitserve_kernels.paged_batch import AttentionOptions

_log = logging.getLogger(__name__)

_NUM_SEQUENCES = 2
_MIN_PROBE_TOKENS = 16
# A window up to this size is probed past its end.
_MAX_PROBED_WINDOW = 160
_TOKENS_PAST_WINDOW = 16
# Errors (see _error) that are taken for rounding without further question. Ordinary models of 2 to
# 32 layers stay below half of it.
_TOLERANCES = {torch.float32: 3e-4, torch.float16: 0.02, torch.bfloat16: 0.06}
# What weights rounded to 8 bits may change. Models that were tried stay below a quarter of it.
_INT8_TOLERANCE = 0.3
# Deep mixtures in half precision may be noisier by themselves. Then this many times their own
# noise is allowed, up to a bound: unrelated logits differ by 1.4.
_NOISE_FACTOR = 3.0
_MAX_TOLERANCE = 0.5


class ReplacementWrong(Exception):
    """What was to run instead of a model computes something else."""


@dataclass(frozen=True, slots=True)
class AttentionProfile:
    """What a model's attention is made of: parallel, in the order of the forward pass.

    `options`: as each module passes them to the attention. `probe`: what came of it.
    """

    modules: tuple[nn.Module, ...]
    layers: tuple[LayerShape, ...]
    options: tuple[AttentionOptions, ...]
    probe: Probe

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding windows in tokens, None for none."""
        return tuple(options.sliding_window for options in self.options)

    @property
    def sliding_window(self) -> int | None:
        """How many tokens, itself included, a token attends to at most; None if to all."""
        limited = [window for window in self.windows if window is not None]
        return max(limited) if limited and len(limited) == len(self.windows) else None


@torch.inference_mode()
def check_model(model: Any, text_config: Any, max_model_len: int) -> AttentionProfile:  # noqa: ANN401
    """Switches `model` to paged attention and compares its logits with those from before.

    `model`, `text_config`: of `transformers`. Raises ModelUnsupported if the model cannot be
    served; the model is then left as it happens to be.
    """
    name = type(model).__name__
    try:
        return _check(model, text_config, max_model_len)
    except ModelUnsupported as error:
        raise _not_served(name, str(error)) from error
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemory(f"{name}: no memory left to try it ({one_line(error)})") from error
        # The models' own code may raise anything.
        raise _not_served(name, f"a trial run failed ({one_line(error)})") from error


def _not_served(name: str, reason: str) -> ModelUnsupported:
    served = "served would be what says the same through paged attention as by itself"
    return ModelUnsupported(f"{name}: not served, since {reason}; {served}")


@torch.inference_mode()
def check_replacement(
    loaded: LoadedModel, compute: Callable[[Tensor], Tensor], *, is_int8: bool = False
) -> float:
    """Compares a replacement of `loaded.model` with what that said of the probe tokens.

    `compute`: the replacement's logits [Q, L, V] of probe tokens [Q, L]; it may take the model
    apart. `is_int8`: the replacement's weights are rounded. Returns the relative error
    of its logits. Raises ReplacementWrong if they are others, or it raises something.
    """
    assert loaded.probe is not None, "models are replaced before it is settled what runs them"
    expected = loaded.probe.logits
    tolerance = _INT8_TOLERANCE if is_int8 else _TOLERANCES[loaded.dtype]
    try:
        actual = compute(loaded.probe.tokens)
    except Exception as error:
        # Models may look into their parts in any way.
        raise ReplacementWrong(f"{type(error).__name__}: {one_line(error)}") from error
    difference = _error(expected[..., : actual.shape[-1]], actual)
    if not difference <= tolerance:
        raise ReplacementWrong(
            f"relative error of the logits {difference:.2g}, allowed {tolerance:.2g}"
        )
    if is_int8:
        _log.info("int8_checked relative_error_of_logits=%.2g", difference)
    return difference


def _check(model: Any, text_config: Any, max_model_len: int) -> AttentionProfile:  # noqa: ANN401
    tokens = _probe_tokens(model, text_config, max_model_len)
    expected = model(input_ids=tokens, use_cache=True).logits.float()
    if not bool(torch.isfinite(expected).all()):
        raise ModelUnsupported(f"its logits are not finite in {model.dtype}; try another --dtype")
    register_attention()
    model.set_attn_implementation(IMPLEMENTATION_NAME)
    actual, context = probe_attention(model, tokens)
    if not context.pools:
        raise ModelUnsupported("it bypasses transformers' attention interface")
    profile = AttentionProfile(
        tuple(context.pools),
        context.layers,
        tuple(context.options.values()),
        Probe(tokens, actual),
    )
    _check_windows(text_config, max_model_len, profile.windows)
    _check_agreement(model, tokens, expected, actual)
    return profile


def _probe_tokens(model: Any, text_config: Any, max_model_len: int) -> Tensor:  # noqa: ANN401
    """Random tokens [Q, L], long enough to pass the end of a small sliding window."""
    length = _MIN_PROBE_TOKENS
    window = getattr(text_config, "sliding_window", None)
    if isinstance(window, int) and window <= _MAX_PROBED_WINDOW:
        length = max(length, window + _TOKENS_PAST_WINDOW)
    vocab_size = model.get_input_embeddings().weight.shape[0]
    # Placeholder tokens (of images, say) would be replaced or counted.
    special = {
        token_id
        for config in (model.config, text_config)
        for attribute, token_id in vars(config).items()
        if attribute.endswith(("_token_id", "_token_index")) and isinstance(token_id, int)
    }
    ordinary = torch.tensor([t for t in range(vocab_size) if t not in special])
    chosen = torch.randint(
        len(ordinary),
        (_NUM_SEQUENCES, min(length, max_model_len)),
        generator=torch.Generator().manual_seed(0),
    )
    return ordinary[chosen].to(model.device)


def _check_windows(
    text_config: Any,  # noqa: ANN401
    max_model_len: int,
    windows: Sequence[int | None],
) -> None:
    """A window too large to be probed must at least have been passed on to the attention."""
    for window, expected in zip(windows, expected_windows(text_config, len(windows)), strict=True):
        if isinstance(expected, int) and expected < max_model_len and window != expected:
            raise ModelUnsupported(
                f"its sliding window of {expected} tokens is applied by mask only;"
                f" use --max-model-len {expected} or less"
            )


def _check_agreement(model: Any, tokens: Tensor, expected: Tensor, actual: Tensor) -> None:  # noqa: ANN401
    """Raises ModelUnsupported if `actual` is not `expected` up to rounding; both [Q, L, V]."""
    error = _error(expected, actual)
    tolerance = _TOLERANCES[model.dtype]
    if error > tolerance and model.dtype != torch.float32:
        noisy, _ = probe_attention(model, tokens, torch.finfo(model.dtype).eps)
        noise = _error(actual, noisy)
        tolerance = min(max(tolerance, _NOISE_FACTOR * noise), _MAX_TOLERANCE)
    if not error <= tolerance:
        raise ModelUnsupported(
            "its logits through paged attention differ from transformers' own"
            f" (relative error {error:.2g}, allowed {tolerance:.2g} in {model.dtype}); it may"
            " keep state outside attention or use a mask of its own"
        )


def _error(expected: Tensor, actual: Tensor) -> float:
    """Largest error over stretches of 8 positions; of each, the median over its positions.

    The error of a position is the size of the difference over the size of the (centred) logits. The
    median lets single positions differ, where rounding made a mixture choose another expert; what
    is wrong with a model is wrong at many positions. NaN if `actual` holds any.
    """
    centred = expected - expected.mean(dim=-1, keepdim=True)
    scale = centred.norm(dim=-1).clamp(min=1e-6)
    errors = (actual - expected).norm(dim=-1) / scale
    if not bool(torch.isfinite(errors).all()):
        return float("nan")
    return max(float(part.median()) for row in errors for part in row.split(8))
