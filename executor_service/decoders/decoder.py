"""Interface of our own decoders, which replace `transformers` code, and their two trials.

First the decoder computes the first layers in float32, at positions where a model may begin to
compute something else. Then the whole decoder, with its packed weights, is compared with the model.

The first trial also judges unknown fields of the configuration. Its sequences are longer than every
whole number in such a field, which may be the width of a sliding window. If a number is too large
for that, the decoder is refused if the model's code reads the field.

Shape letters: Q sequences, L tokens of each, T input tokens, S rows of logits, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from executor_service.decoders.llama_config import rotation_at, unknown_fields
from executor_service.device import KVCache, release_freed_memory
from executor_service.errors import OutOfMemory, TrialFailed
from executor_service.model import (
    SCRATCH_BLOCK_SIZE,
    LoadedModel,
    num_scratch_blocks,
    probe_attention,
    run_in_steps,
)
from executor_service.trials import (
    CUT_VOCAB_SIZE,
    FLOAT32_TOLERANCE,
    KnownLogits,
    TrialTokens,
    float32_trial,
    rounded_matrices,
    trial_failures,
    try_replacement,
    whole_numbers,
)
from splitserve_kernels.paged_batch import PagedBatch

# Smaller than the sequences of the trial, so that some tokens are outside the window.
_NARROW_WINDOW = 6
# The trial's sequences are longer than whole numbers of unknown fields up to this one.
_MAX_PASSED = 1008
# Weights of 16 bits often lie just between two steps of 8 bits. This ratio of noise avoids that.
_NOISE = 0.01


class Decoder(Protocol):
    """Computes tokens of many sequences on the pools of any cache of its model."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        ...

    def run(
        self, input_ids: Tensor, positions: Tensor, paged: PagedBatch, index: Tensor, cache: KVCache
    ) -> Tensor:
        """Returns logits [S, V] of the tokens at `index` [S], float32 or in the model's dtype.

        It writes keys and values of all tokens to the pools. `input_ids`, `positions`: [T] int64.
        `index`: [S] int64. The next call may overwrite the logits.
        """
        ...

    def run_with_rotation(
        self,
        input_ids: Tensor,
        rotation: tuple[Tensor, Tensor],
        paged: PagedBatch,
        index: Tensor,
        cache: KVCache,
    ) -> Tensor:
        """Computes the same as `run`, with the given cosines and sines of each token.

        They are [T, rotary_dim / 2] float32 each.
        """
        ...


_Decoder = TypeVar("_Decoder", bound=Decoder)


def try_decoder(
    loaded: LoadedModel,
    make: Callable[[LoadedModel], _Decoder],
    block_size: int = SCRATCH_BLOCK_SIZE,
    *,
    is_int8: bool = False,
) -> _Decoder:
    """Returns the decoder that `make` makes of the parts of `loaded`, which is lost then.

    `make` is called for a cut of `loaded` in float32 before. Raises TrialFailed if a decoder
    computes something else than its model. `is_int8`: the decoder's weights are rounded.
    `block_size`: of the trial's pools, which have the dtype of the model.
    """
    _try_in_float32(loaded, make, block_size, is_int8=is_int8)
    release_freed_memory()
    made: list[_Decoder] = []

    def compute(tokens: Tensor) -> Tensor:
        made.append(make(loaded))
        starts = torch.zeros(len(tokens), dtype=torch.int64)
        return _run_decoder(loaded, made[0].run, TrialTokens(tokens, starts), block_size)

    try_replacement(loaded, compute, is_int8=is_int8)
    return made[0]


@torch.inference_mode()
def _try_in_float32(
    loaded: LoadedModel,
    make: Callable[[LoadedModel], Decoder],
    block_size: int,
    *,
    is_int8: bool,
) -> None:
    """Raises TrialFailed if a decoder of a cut differs from `transformers`' forward pass."""
    with trial_failures():
        known = _known_in_float32(loaded, is_int8=is_int8)
        cut = _loaded_cut(loaded, known)
        decoder = make(cut)

        def forward(
            input_ids: Tensor, positions: Tensor, batch: PagedBatch, index: Tensor, cache: KVCache
        ) -> Tensor:
            # Cosines and sines of these positions only: tables up to far ones would take long.
            rotation = rotation_at(cut, positions)
            return decoder.run_with_rotation(input_ids, rotation, batch, index, cache)

        known.trial(
            lambda question: _run_decoder(cut, forward, question, block_size),
            FLOAT32_TOLERANCE,
            lambda error: (
                f"relative error of the logits {error:.2g}, allowed {FLOAT32_TOLERANCE:.2g} in"
                " float32"
            ),
        ).check()


def _known_in_float32(loaded: LoadedModel, *, is_int8: bool) -> KnownLogits:
    """Prepares the trial of a cut.

    Raises OutOfMemory, and TrialFailed if a trial cannot judge an unknown field.
    """
    unknown = unknown_fields(vars(loaded.model.config))
    # Rotary parameters (their names have a dot) concern positions, never numbers of tokens.
    limits = [
        (number, name)
        for name, setting in unknown.items()
        if "." not in name
        for number, _ in whole_numbers({name: setting})
    ]
    passed = [number for number, _ in limits if 0 < number <= _MAX_PASSED]
    reading = ReadFields(name for n, name in limits if _MAX_PASSED < n < loaded.max_model_len)
    reading.build(loaded.model)

    def prepare(cut: Any) -> None:  # noqa: ANN401
        (_prepare_int8 if is_int8 else _narrow_windows)(cut)
        reading.watch(cut.config)

    known = float32_trial(
        loaded.model,
        loaded.attention_modules,
        loaded.max_model_len,
        prepare,
        rounded_matrices if is_int8 else nullcontext,
        max(passed, default=0),
    )
    if known is None:
        raise OutOfMemory("not enough memory for a layer in float32")
    for name in reading.names:
        raise TrialFailed(
            f"its code reads {name} = {unknown[name]!r}; the trial has no sequences of that length"
        )
    return known


def _narrow_windows(cut: Any) -> None:  # noqa: ANN401
    """Narrows sliding windows so that they end within the tokens of the trial.

    Decoders take the width of windows from what the model's modules pass to attention.
    """
    for settings in (cut.config, *cut.modules()):
        if isinstance(getattr(settings, "sliding_window", None), int):
            settings.sliding_window = _NARROW_WINDOW


def _prepare_int8(cut: Any) -> None:  # noqa: ANN401
    """Narrows windows, and adds noise to weights.

    With the noise, weights do not lie just between two rounding steps.
    """
    _narrow_windows(cut)
    generator = torch.Generator().manual_seed(0)
    for parameter in cut.parameters():
        noise = torch.rand(parameter.shape, generator=generator).to(parameter.device)
        parameter.data = parameter.data * (1 + _NOISE * noise)


def _loaded_cut(loaded: LoadedModel, known: KnownLogits) -> LoadedModel:
    _, context = probe_attention(known.model, known.questions[0].tokens)
    return replace(
        loaded,
        model=known.model,
        dtype=torch.float32,
        kv_dtype=torch.float32,
        attention_modules=tuple(context.pools),
        layers=context.layers,
        layer_options=tuple(context.options.values()),
        vocab_size=min(loaded.vocab_size, CUT_VOCAB_SIZE),
        max_model_len=1,  # longer tables are not used
        expected=None,
    )


_Run = Callable[[Tensor, Tensor, PagedBatch, Tensor, KVCache], Tensor]


def _run_decoder(loaded: LoadedModel, run: _Run, question: TrialTokens, block_size: int) -> Tensor:
    """Returns the logits [Q, L, V] of `question`, computed on new pools."""
    num_blocks = num_scratch_blocks(question.tokens, block_size)
    cache = KVCache(loaded.layers, block_size, num_blocks, 0, loaded.dtype, loaded.device)

    def forward(input_ids: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        index = torch.arange(len(input_ids), device=loaded.device)
        return run(input_ids, positions, batch, index, cache).float()

    return run_in_steps(question.tokens, forward, block_size, question.starts)


# -- Configuration fields that a model's code reads ------------------------------------------------


class ReadFields:
    """Notes which of some configuration fields are read while a model is built and runs."""

    def __init__(self, names: Iterable[str]) -> None:
        self._watched = frozenset(names)
        self._read: dict[str, None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the fields read so far."""
        return tuple(self._read)

    def build(self, model: Any) -> None:  # noqa: ANN401
        """Builds a model like `model`, without numbers, and notes the fields that it reads."""
        if not self._watched:
            return
        config = copy.deepcopy(model.config)
        self.watch(config)
        with torch.device("meta"):
            type(model)(config)

    def watch(self, config: Any) -> None:  # noqa: ANN401
        """Notes the fields read from `config` from now on. Changes the class of `config`."""
        if not self._watched:
            return
        original, watched, read = type(config), self._watched, self._read

        class Watched(original):  # type: ignore[misc, valid-type]
            def __getattribute__(self, attribute: str) -> Any:  # noqa: ANN401
                if attribute in watched:
                    read[attribute] = None
                return super().__getattribute__(attribute)

        config.__class__ = Watched
