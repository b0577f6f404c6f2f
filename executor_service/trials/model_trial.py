"""Trial of a model at load: paged attention must give the same logits as `transformers`.

Two random sequences go through the model as `transformers` runs it, and then in uneven parts
through paged attention. Behaviour that the configuration did not reveal (state outside attention, a
mask of the model's own, positions from elsewhere) shows as a difference in float32, where nothing
else does. A replacement of a whole model in 16 bits is compared with the model's own noise.

Shape letters: Q sequences, L tokens of each, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor_service.device import LayerShape, is_out_of_memory
from executor_service.errors import ModelUnsupported, OutOfMemory, TrialFailed, one_line
from executor_service.model import (
    IMPLEMENTATION_NAME,
    ExpectedLogits,
    LoadedModel,
    expected_windows,
    probe_attention,
    register_attention,
    rounded_inputs,
)
from executor_service.trials.layer_trial import (
    FLOAT32_TOLERANCE,
    TrialTokens,
    float32_trial,
    near_tokens,
    trial_of,
    typical_error,
)
from executor_service.trials.trial import Trial, trial_failures
from splitserve_kernels.cpu import DTYPES
from splitserve_kernels.paged_batch import AttentionOptions

_log = logging.getLogger(__name__)

# In 16 bits, an error of up to this many times the model's own rounding counts as rounding, up to a
# bound: unrelated logits differ by 1.4.
_NOISE_FACTOR = 3.0
_MAX_TOLERANCE = 0.5


@dataclass(frozen=True, slots=True)
class AttentionProfile:
    """Attention of a model, by module.

    `modules`, `layers` and `options` are parallel, in the order of the forward pass. `options`: as
    each module passes them to attention. `expected`: the resulting logits.
    """

    modules: tuple[nn.Module, ...]
    layers: tuple[LayerShape, ...]
    options: tuple[AttentionOptions, ...]
    expected: ExpectedLogits

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each module in tokens; None for none."""
        return tuple(options.sliding_window for options in self.options)

    @property
    def sliding_window(self) -> int | None:
        """Most tokens, itself included, that a token attends to; None if any layer has no limit."""
        limited = [window for window in self.windows if window is not None]
        return max(limited) if limited and len(limited) == len(self.windows) else None


@torch.inference_mode()
def try_model(model: Any, text_config: Any, max_model_len: int) -> AttentionProfile:  # noqa: ANN401
    """Switches `model` to paged attention and compares its logits with those of `transformers`.

    `model`, `text_config`: of `transformers`. Raises ModelUnsupported if the model cannot be
    served, which leaves it in an undefined state, and OutOfMemory if there is no memory for the
    trial.
    """
    name = type(model).__name__
    try:
        return _try(model, text_config, max_model_len)
    except ModelUnsupported as error:
        raise _not_served(name, str(error)) from error
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemory(
                f"{name}: out of memory during the trial run ({one_line(error)})"
            ) from error
        # The models' own code may raise anything.
        raise _not_served(name, _why_it_failed(model, text_config, error)) from error


def _why_it_failed(model: Any, text_config: Any, error: Exception) -> str:  # noqa: ANN401
    """Returns why a trial run raised `error`: by the model's own code, or by paged attention alone.

    The text of such errors is often about shapes, which does not tell.
    """
    tokens = near_tokens(model, text_config, 1).tokens
    try:
        model.set_attn_implementation("eager")
        model(input_ids=tokens, use_cache=False)
    except Exception as own:
        # The models' own code may raise anything, here too.
        return (
            "a trial run failed: its code in transformers cannot run with this config.json,"
            f" even without paged attention ({one_line(own)})"
        )
    return f"a trial run failed only with paged attention ({one_line(error)})"


def _not_served(name: str, reason: str) -> ModelUnsupported:
    supported = "supported: a model whose output is the same with paged attention"
    return ModelUnsupported(f"{name}: not served, because {reason}; {supported}")


@torch.inference_mode()
def try_replacement(
    loaded: LoadedModel, compute: Callable[[Tensor], Tensor], *, is_int8: bool = False
) -> float:
    """Compares a replacement of `loaded.model` with the model's own logits of the same tokens.

    `compute`: returns the replacement's logits [Q, L, V] of tokens [Q, L]; it may take the model
    apart. `is_int8`: the replacement's weights are rounded, and so are those of the reference.
    Returns the relative error of the logits. Raises TrialFailed if they differ by more than the
    model's own noise, or if the replacement raises.
    """
    of_model = loaded.expected
    assert of_model is not None, "expected logits are kept until the backend is chosen"
    expected, noise = of_model.logits, of_model.noise
    with trial_failures():
        if is_int8:
            expected, undecided = _rounded_logits(loaded.model, of_model.tokens)
            noise = max(noise, undecided)
        tolerance = _tolerance(loaded.dtype, noise)
        return Trial(
            reference=lambda _tokens: expected,
            candidate=compute,
            cases=(of_model.tokens,),
            error_of=lambda _tokens, right, actual: typical_error(
                right[..., : actual.shape[-1]], actual
            ),
            allowed=tolerance,
            complaint=lambda error: (
                f"relative error of the logits {error:.2g}, allowed {tolerance:.2g}"
            ),
        ).check()


def _try(model: Any, text_config: Any, max_model_len: int) -> AttentionProfile:  # noqa: ANN401
    tokens = near_tokens(model, text_config, max_model_len).tokens
    register_attention()
    model.set_attn_implementation(IMPLEMENTATION_NAME)
    logits, context = probe_attention(model, tokens)
    if not context.pools:
        raise ModelUnsupported("it bypasses transformers' attention interface")
    if not bool(torch.isfinite(logits).all()):
        raise ModelUnsupported(f"its logits are not finite in {model.dtype}; try another --dtype")
    profile = AttentionProfile(
        tuple(context.pools),
        context.layers,
        tuple(context.options.values()),
        ExpectedLogits(tokens, logits, _noise(model, tokens, logits)),
    )
    _check_windows(text_config, max_model_len, profile.windows)
    _try_agreement(model, profile, max_model_len)
    return profile


def _try_agreement(model: Any, profile: AttentionProfile, max_model_len: int) -> None:  # noqa: ANN401
    """Raises ModelUnsupported if layers compute something else through paged attention."""
    dtype, noise = torch.float32, 0.0
    known = float32_trial(model, profile.modules, max_model_len)
    if known is None:
        _log.warning("not_tried_in_float32 model=%s: not enough memory", type(model).__name__)
        dtype, noise = model.dtype, profile.expected.noise
        known = trial_of(model, max_model_len)
    tried = known.model

    def compute(question: TrialTokens) -> Tensor:
        return probe_attention(tried, question.tokens, starts=question.starts)[0]

    tolerance = _tolerance(dtype, noise)

    def complaint(error: float) -> str:
        return (
            "its logits with paged attention differ from those of transformers"
            f" (relative error {error:.2g}, allowed {tolerance:.2g} in {dtype}); it may"
            " keep state outside attention or use its own mask"
        )

    try:
        known.trial(compute, tolerance, complaint).check()
    except TrialFailed as error:
        raise ModelUnsupported(str(error)) from error


def _noise(model: Any, tokens: Tensor, logits: Tensor) -> float:  # noqa: ANN401
    """Returns the error of `logits`, those of `tokens`, that another order of sums causes.

    The sequences run in one step, the last bit of each attention output is changed, and quantised
    layers round their inputs.
    """
    if model.dtype == torch.float32:
        return 0.0
    with rounded_inputs(model):
        noisy, _ = probe_attention(model, tokens, torch.finfo(model.dtype).eps, is_cut=False)
    return typical_error(logits, noisy)


def _rounded_logits(model: Any, tokens: Tensor) -> tuple[Tensor, float]:  # noqa: ANN401
    """Returns the logits of `tokens` with rounded weights, and the effect of rounding ties."""
    logits = []
    # In 16 bits the model's own noise is larger than the effect of ties.
    for nudge in NUDGES if model.dtype == torch.float32 else (1.0,):
        with rounded_matrices(model, nudge):
            logits.append(probe_attention(model, tokens, is_cut=False)[0])
    return logits[0], typical_error(logits[0], logits[-1])


def _tolerance(dtype: torch.dtype, noise: float) -> float:
    # Logits of 16 bits are rounded themselves, so equal results agree only up to the last bit.
    least = FLOAT32_TOLERANCE if dtype == torch.float32 else torch.finfo(dtype).eps
    return min(max(least, _NOISE_FACTOR * noise), _MAX_TOLERANCE)


def _check_windows(
    text_config: Any,  # noqa: ANN401
    max_model_len: int,
    windows: Sequence[int | None],
) -> None:
    """Raises ModelUnsupported if a window too large to be tried was not passed on to attention."""
    for window, expected in zip(windows, expected_windows(text_config, len(windows)), strict=True):
        if isinstance(expected, int) and expected < max_model_len and window != expected:
            raise ModelUnsupported(
                f"its sliding window of {expected} tokens is applied by mask only;"
                f" use --max-model-len {expected} or less"
            )


# -- Reference results of weights rounded to 8 bits ------------------------------------------------
#
# Kernels that multiply with integers are compared with these exact results.

_NUM_STEPS = 127
_ROWS_AT_A_TIME = 4096


# Weights of 16 bits often lie just between two steps, where the last bit of a product decides how
# they are rounded.
NUDGES = (1 - 2.0**-20, 1 + 2.0**-20)


def can_be_packed(module: nn.Module) -> bool:
    """Returns whether `module` is a matrix that native kernels take.

    Subclasses of `nn.Linear` are excluded: they compute something else.
    """
    return (
        type(module) is nn.Linear and module.weight.dtype in DTYPES and module.in_features % 2 == 0
    )


@contextmanager
def rounded_matrices(model: nn.Module, nudge: float = 1.0) -> Iterator[None]:
    """Inside, the matrices of `model` multiply with the rounded weights that `pack` makes.

    Weights and sums are float32; results have the dtype of the input. Only a part of one matrix at
    a time is rounded. `nudge`: a factor of about 1 for the weights before rounding, to show the
    effect of weights between two steps.
    """
    matrices: list[Any] = [module for module in model.modules() if can_be_packed(module)]
    for matrix in matrices:
        matrix.forward = partial(_multiply_rounded, matrix, nudge)
    try:
        yield
    finally:
        for matrix in matrices:
            del matrix.forward  # uncovers the method of the class


def _multiply_rounded(matrix: nn.Linear, nudge: float, rows: Tensor) -> Tensor:
    parts = torch.split(matrix.weight.detach(), _ROWS_AT_A_TIME)
    inputs = rows.float()
    sums = torch.cat([functional.linear(inputs, _rounded(part, nudge)) for part in parts], dim=-1)
    if matrix.bias is not None:
        sums += matrix.bias.detach().float()
    return sums.to(rows.dtype)


def _rounded(weight: Tensor, nudge: float) -> Tensor:
    """Rounds `weight` [N, K] to 127 steps on either side of 0, by row. Returns float32."""
    weight = weight.float()
    largest = weight.abs().amax(dim=1, keepdim=True)
    factor = torch.where(largest > 0, _NUM_STEPS / largest, 1.0)
    return torch.round(weight * (factor * nudge)) * (largest / _NUM_STEPS)
