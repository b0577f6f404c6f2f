"""Trial of a model's layers in float32, whatever dtype serves, also at far positions.

The reference is always the forward pass of `transformers`, on the same tokens and positions. The
module also has the error measures of trials, their tokens, and the cut of a model to float32.

Shape letters: Q sequences, L tokens of each, V vocabulary.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from executor_service.device import available_host_bytes
from executor_service.model import (
    IMPLEMENTATION_NAME,
    QuantizedLayer,
    context_of,
    quantized_layers,
    unbind,
)
from executor_service.trials.trial import Trial


@dataclass(frozen=True, slots=True)
class KnownLogits:
    """A small or cut model, the tokens it is tried with, and its own logits [Q, L, V].

    `model` is switched to paged attention.
    """

    model: Any
    questions: tuple[TrialTokens, ...]
    answers: tuple[Tensor, ...]

    def trial(
        self,
        compute: Callable[[TrialTokens], Tensor],
        tolerance: float,
        complaint: Callable[[float], str],
    ) -> Trial[tuple[TrialTokens, Tensor], Tensor]:
        """Returns the trial of `compute`, which returns the logits [Q, L, V] of tokens."""
        return Trial(
            reference=lambda case: case[1],
            candidate=lambda case: compute(case[0]),
            cases=tuple(zip(self.questions, self.answers, strict=True)),
            error_of=lambda _case, expected, actual: relative_error(
                expected[..., : actual.shape[-1]], actual
            ),
            allowed=tolerance,
            complaint=complaint,
        )


def float32_trial(
    model: Any,  # noqa: ANN401
    attention_modules: Iterable[nn.Module],
    max_model_len: int,
    prepare: Callable[[Any], None] = lambda _cut: None,
    answering: Callable[[Any], AbstractContextManager[None]] = nullcontext,
    passed: int = 0,
) -> KnownLogits | None:
    """Prepares a trial of a cut of `model` in float32; None if there is not enough memory.

    `attention_modules`: modules of `model` that attend. `prepare` changes the cut before it
    computes the reference logits, inside the context `answering`. `passed`: as in `near_tokens`.
    """
    cut = cut_to_float32(model, attention_modules)
    if cut is None:
        return None
    prepare(cut)
    return trial_of(cut, max_model_len, answering, passed)


def trial_of(
    model: Any,  # noqa: ANN401
    max_model_len: int,
    answering: Callable[[Any], AbstractContextManager[None]] = nullcontext,
    passed: int = 0,
) -> KnownLogits:
    """Prepares a trial of `model`.

    It computes the model's logits with eager attention, inside `answering`. `passed`: as in
    `near_tokens`.
    """
    text_config = model.config.get_text_config(decoder=True)
    near = near_tokens(model, text_config, max_model_len, passed)
    far = far_tokens(model, text_config, max_model_len)
    # Every model has eager attention, and it leaves nothing out.
    model.set_attn_implementation("eager")
    with answering(model):
        # Without positions, as in usual calls: the model decides the position of the first token.
        near_output = model(input_ids=near.tokens, use_cache=True)
        far_output = model(input_ids=far.tokens, position_ids=far.position_ids, use_cache=False)
    answers = near_output.logits.float(), far_output.logits.float()
    model.set_attn_implementation(IMPLEMENTATION_NAME)
    return KnownLogits(model, (near, far), answers)


# -- Error measures of logits ----------------------------------------------------------------------
#
# Shape letters: Q sequences, L tokens of each, V vocabulary.

# Largest error (see `relative_error`) in float32 that counts as rounding. Ordinary models of 2 to
# 32 layers stay below half of it.
FLOAT32_TOLERANCE = 3e-4


def relative_error(expected: Tensor, actual: Tensor) -> float:
    """Returns the largest error over stretches of 8 positions; that of a stretch is the median.

    `expected`, `actual`: [Q, L, V]. The error of a position is the norm of the difference divided
    by the norm of the centred logits. The median ignores single positions, where rounding made a
    mixture choose another expert; a wrong model is wrong at many positions. NaN if `actual` holds
    any.
    """
    errors = _errors(expected, actual)
    if not bool(torch.isfinite(errors).all()):
        return float("nan")
    return max(float(part.median()) for row in errors for part in row.split(8))


def typical_error(expected: Tensor, actual: Tensor) -> float:
    """Returns the median error over all positions; NaN if `actual` holds any.

    In 16 bits rounding often makes a mixture choose another expert, and later tokens attend to that
    token, so errors of single stretches tell little.
    """
    errors = _errors(expected, actual)
    return float(errors.median()) if bool(torch.isfinite(errors).all()) else float("nan")


def _errors(expected: Tensor, actual: Tensor) -> Tensor:
    """Returns the error of each position, [Q, L]."""
    # One after the other: the logits of a large vocabulary take much memory.
    pairs = zip(expected.flatten(0, -2), actual.flatten(0, -2), strict=True)
    errors = torch.stack([_error_of_position(*each) for each in pairs])
    return errors.view(expected.shape[:-1])


def _error_of_position(expected: Tensor, actual: Tensor) -> Tensor:
    centred = expected - expected.mean()
    error: Tensor = (actual - expected).norm() / centred.norm().clamp(min=1e-6)
    return error


# -- Random tokens of trials -----------------------------------------------------------------------
#
# Their positions are the first ones, or far ones.
#
# Shape letters: Q sequences, L tokens of each.

_NUM_NEAR_SEQUENCES = 2
_MIN_NEAR_TOKENS = 16
# A window up to this size is tried past its end.
_MAX_TRIED_WINDOW = 160
TOKENS_PAST_WINDOW = 16
# Tokens around a boundary, most of them after it: a minority may differ by chance.
_NUM_FAR_TOKENS = 8
_NUM_BEFORE_BOUNDARY = 2
_MAX_NUM_BOUNDARIES = 64
_POSITIONAL = re.compile(r"position|window|chunk|length|seq|floor|scale|context|ctx")


@dataclass(frozen=True, slots=True)
class TrialTokens:
    """Tokens of a trial: `tokens` [Q, L], sequence q begins at position `starts[q]`, [Q]."""

    tokens: Tensor
    starts: Tensor

    @property
    def position_ids(self) -> Tensor:
        """Positions of the tokens, [Q, L]."""
        steps = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return self.starts[:, None] + steps


def near_tokens(
    model: Any,  # noqa: ANN401
    text_config: Any,  # noqa: ANN401
    max_model_len: int,
    passed: int = 0,
) -> TrialTokens:
    """Returns tokens from position 0 on, long enough to pass the end of a small sliding window.

    `passed`: a number of tokens that the sequences exceed in any case.
    """
    length = max(_MIN_NEAR_TOKENS, passed + TOKENS_PAST_WINDOW if passed else 0)
    window = getattr(text_config, "sliding_window", None)
    if isinstance(window, int) and window <= _MAX_TRIED_WINDOW:
        length = max(length, window + TOKENS_PAST_WINDOW)
    return _random(model, text_config, min(length, max_model_len), [0] * _NUM_NEAR_SEQUENCES)


def far_tokens(model: Any, text_config: Any, max_model_len: int) -> TrialTokens:  # noqa: ANN401
    """Returns tokens around each position from which on a model may compute something else.

    These positions are all whole numbers of its configuration, whatever their names: it is unknown
    which field a later `transformers` compares positions with. The last positions are included.
    """
    length = min(_NUM_FAR_TOKENS, max_model_len)
    last = max_model_len - length
    numbers = dict(whole_numbers(vars(text_config)))
    # Fields with a telling name come first, in case there are too many.
    by_name = sorted(numbers, key=lambda number: (not _POSITIONAL.search(numbers[number]), number))
    starts = [number - _NUM_BEFORE_BOUNDARY for number in by_name]
    starts = [start for start in starts if 0 < start < last][: _MAX_NUM_BOUNDARIES - 1]
    return _random(model, text_config, length, [*starts, last])


def whole_numbers(settings: Mapping[str, object]) -> Iterator[tuple[int, str]]:
    """Yields the whole numbers of a configuration, nested ones included, and the name of each."""
    for name, setting in settings.items():
        if isinstance(setting, dict):
            yield from whole_numbers({str(key): each for key, each in setting.items()})
        elif isinstance(setting, (list, tuple)):
            for each in setting:
                yield from whole_numbers({name: each})
        elif isinstance(setting, (int, float)) and setting == setting // 1 and setting < 2**31:
            yield int(setting), name


def _random(
    model: Any,  # noqa: ANN401
    text_config: Any,  # noqa: ANN401
    length: int,
    starts: list[int],
) -> TrialTokens:
    vocab_size = embedding_of(model).num_embeddings
    # Placeholder tokens (of images, say) would be replaced or counted.
    special = {
        token_id
        for config in (model.config, text_config)
        for attribute, token_id in vars(config).items()
        if attribute.endswith(("_token_id", "_token_index")) and isinstance(token_id, int)
    }
    ordinary = torch.tensor([t for t in range(min(vocab_size, CUT_VOCAB_SIZE)) if t not in special])
    chosen = torch.randint(
        len(ordinary), (len(starts), length), generator=torch.Generator().manual_seed(0)
    )
    return TrialTokens(ordinary[chosen].to(model.device), torch.tensor(starts, device=model.device))


# -- Cuts of models to float32 ---------------------------------------------------------------------
#
# A cut has the first layers, one of every kind. In 16 bits a model's own rounding hides errors of
# the same size. In float32 the same layers with the same weights show them, and copying a few
# layers takes little memory and time.

# Vocabulary of a cut: the rows of large vocabularies take more memory than a few layers.
CUT_VOCAB_SIZE = 1024
# A model that takes at most this in float32 keeps all layers.
_SMALL_BYTES = 64 * 2**20
# Limits of the memory of a cut's layers: bytes, and share of the free memory.
_LARGEST_BYTES = 4 * 2**30
_LARGEST_RATIO = 0.25
_LAYER_NUMBER = re.compile(r"idx|index|layer_?(id|num)")


def cut_to_float32(model: Any, attention_modules: Iterable[nn.Module]) -> Any | None:  # noqa: ANN401
    """Copies the first layers of `model` in float32.

    None if there is no room for every kind of layer. The copy shares nothing with `model` but
    numbers that are float32 already. `attention_modules`: the modules that attend, in their order.
    """
    room = min(_LARGEST_BYTES, int(_LARGEST_RATIO * _available_bytes(model.device)))
    layers = _layers(model, list(attention_modules))
    if not layers:
        return _copy(model, []) if _bytes(model) <= room else None
    sizes = list(itertools.accumulate(_bytes(layer) for layer in layers))
    num_layers = len(layers) if sizes[-1] <= _SMALL_BYTES else _num_first_kinds(model, layers)
    if sizes[num_layers - 1] > room:
        return None
    cut = _copy(model, layers[num_layers:])
    if num_layers < len(layers):
        _shorten(cut, len(layers), num_layers)
    return cut


def _layers(model: nn.Module, attention_modules: list[nn.Module]) -> list[nn.Module]:
    """Returns the list of layers with one attending module in each.

    Returns an empty list if the model has none.
    """
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == len(attention_modules):
            pairs = zip(module, attention_modules, strict=True)
            if all(attention in set(layer.modules()) for layer, attention in pairs):
                return list(module)
    return []


def _num_first_kinds(model: Any, layers: list[nn.Module]) -> int:  # noqa: ANN401
    """Returns how many layers from the first on include one of every kind."""
    settings = vars(model.config.get_text_config(decoder=True))
    lists = [s for s in settings.values() if isinstance(s, (list, tuple)) and len(s) == len(layers)]
    kinds: list[object] = []
    last_new = -1
    for index, layer in enumerate(layers):
        kind = (list(_properties(layer)), [each[index] for each in lists])
        if kind not in kinds:
            kinds.append(kind)
            last_new = index
    return last_new + 1


def _properties(layer: nn.Module) -> Iterator[object]:
    """Yields facts that identify the kind of a layer.

    They are its modules, their settings and the shapes of its weights.
    """
    for name, module in layer.named_modules():
        yield name, type(module)
        for attribute, setting in vars(module).items():
            is_setting = setting is None or isinstance(setting, (bool, int, float, str))
            if is_setting and not _LAYER_NUMBER.search(attribute):
                yield attribute, setting
    for name, parameter in layer.named_parameters():
        yield name, parameter.shape


def _copy(model: Any, dropped: list[nn.Module]) -> Any:  # noqa: ANN401
    copied = copy.deepcopy(model, _replaced(model, dropped))
    unbind(copied.modules())
    embedding = embedding_of(copied)
    padding = getattr(embedding, "padding_idx", None)
    if padding is not None and padding >= CUT_VOCAB_SIZE:
        # It only matters for training, and torch refuses one that has no row.
        embedding.padding_idx = None
    return copied


def _replaced(model: Any, dropped: list[nn.Module]) -> dict[int, Any]:  # noqa: ANN401
    """Returns replacements of parameters and layers for `copy.deepcopy`, by their ids."""
    memo: dict[int, Any] = {id(layer): nn.Identity() for layer in dropped}
    gone = {module for layer in dropped for module in layer.modules()}
    by_token = {id(tensor) for tensor in _tensors_by_token(model)}
    for module in model.modules():
        if module in gone:
            continue
        if isinstance(module, QuantizedLayer):
            is_by_token = module in (embedding_of(model), model.get_output_embeddings())
            memo[id(module)] = module.dense(
                torch.float32, model.device, CUT_VOCAB_SIZE if is_by_token else None
            )
            continue
        context = context_of(module)
        if context is not None:  # it may be large, and the copy does not need it
            memo[id(context)] = nn.Identity()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            numbers = tensor.detach()
            if id(tensor) in by_token:
                numbers = numbers[:CUT_VOCAB_SIZE]
            if numbers.is_floating_point():
                numbers = numbers.float()
            if isinstance(tensor, nn.Parameter):
                numbers = nn.Parameter(numbers, requires_grad=False)
            memo[id(tensor)] = numbers
    return memo


def embedding_of(model: Any) -> Any:  # noqa: ANN401
    """Returns the embedding of tokens of a model, which classifiers do not name themselves."""
    return getattr(model, "base_model", model).get_input_embeddings()


def _tensors_by_token(model: Any) -> Iterator[Tensor]:  # noqa: ANN401
    """Yields the tensors with one row, or one number, for each token of the vocabulary."""
    for module in (embedding_of(model), model.get_output_embeddings()):
        for name in ("weight", "bias"):
            tensor = getattr(module, name, None)
            if isinstance(tensor, Tensor):
                yield tensor


def _shorten(cut: Any, num_before: int, num_layers: int) -> None:  # noqa: ANN401
    for module in cut.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_before:
            del module[num_layers:]
    cut.config.get_text_config(decoder=True).num_hidden_layers = num_layers


def _bytes(module: nn.Module) -> int:
    """Returns the bytes of the parameters in float32."""
    num_quantised = sum(math.prod(each.stored.shape) for each in quantized_layers(module))
    return 4 * (num_quantised + sum(parameter.numel() for parameter in module.parameters()))


def _available_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_host_bytes()
