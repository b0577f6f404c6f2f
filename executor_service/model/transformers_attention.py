"""Paged attention as an attention implementation of `transformers`, and probe runs through it.

The implementation is a pure function in a registry. Its context (the step's batch and the pools) is
an attribute of each attention module, set by `bind`. So two models in one process do not share
state, and no global holds a step.

Shape letters: T tokens of the flattened batch, H query heads, G key/value heads, D size of a query
or key head, E size of a value head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor_service.device import KVCache, LayerShape
from executor_service.errors import ModelUnsupported
from splitserve_kernels import reference
from splitserve_kernels.paged_batch import (
    AttentionBackend,
    AttentionOptions,
    PagedBatch,
    build_paged_batch,
)

IMPLEMENTATION_NAME = "splitserve_paged"
_CONTEXT_ATTRIBUTE = "_splitserve_context"
_ATTENDING_ATTRIBUTE = "_splitserve_attending"
# Buffer [H, n] of a module; see `AttentionOptions.relative_bias`.
RELATIVE_BIAS = "_splitserve_relative_bias"


class Attending(Enum):
    """Kind of attention in an encoder-decoder model, other than a decoder's to its own tokens.

    ENCODER: a module of the encoder, to all tokens. CROSS: a decoder's, to the encoder's tokens.
    """

    ENCODER = "encoder"
    CROSS = "cross"


# Arguments that models pass to an attention implementation and that change nothing here: they are
# either implied (causal, no dropout, positions) or meant for other implementations.
_IGNORED_ARGUMENTS = frozenset(
    {
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "deterministic",
        "dropout",
        "is_causal",
        "layer_head_mask",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


class AttentionContext(Protocol):
    """Stores keys and values and computes attention for a module."""

    @property
    def sees_later(self) -> bool:
        """Whether modules may be served whose tokens attend to later ones."""
        ...

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Stores `key` [T, G, D] and `value` [T, G, E]. Returns the output [T, H, E]."""
        ...

    def attend_to_encoder(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Attends to an encoder's tokens. Returns the output [T, H, E].

        `key`, `value`: made of the encoder's output of the pass, which may be a placeholder.
        """
        ...


class StepContext:
    """Attends through the KV pools, for the batch of the current forward pass."""

    sees_later = False

    def __init__(
        self,
        cache: KVCache,
        backend: AttentionBackend,
        modules: Iterable[nn.Module],
        cross_modules: Iterable[nn.Module] = (),
    ) -> None:
        """Prepares attention of `modules`, which are in the order of the layers of `cache`.

        `cross_modules`: those of cross attention, in the same order.
        """
        self._cache = cache
        self._backend = backend
        self._layers = {
            module: layer
            for every in (modules, cross_modules)
            for layer, module in enumerate(every)
        }
        self._batch: PagedBatch | None = None
        self._cross: PagedBatch | None = None

    def begin_forward(self, batch: PagedBatch, cross: PagedBatch | None = None) -> None:
        """Sets the batch of the next forward pass.

        `cross`: of cross attention, in which each token is a row that attends to its encoder's
        tokens; None if the model has no cross attention.
        """
        self._batch, self._cross = batch, cross

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        assert self._batch is not None, "begin_forward comes before the forward pass"
        layer = self._layers[module]
        key_pool, value_pool = self._cache.key_pools[layer], self._cache.value_pools[layer]
        scales = self._cache.scales[layer]
        self._backend.write_kv(key, value, key_pool, value_pool, self._batch, scales)
        return self._backend.paged_attention(
            query, key_pool, value_pool, self._batch, options, scales
        )

    def attend_to_encoder(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        del key, value  # of a placeholder
        assert self._cross is not None, "rows of this model have encoder tokens"
        layer = self._layers[module]
        return self._backend.paged_attention(
            query,
            self._cache.key_pools[layer],
            self._cache.value_pools[layer],
            self._cross,
            options,
            self._cache.scales[layer],
        )


def bind(modules: Iterable[nn.Module], context: AttentionContext) -> None:
    """Makes `modules` attend through `context` from now on."""
    for module in modules:
        setattr(module, _CONTEXT_ATTRIBUTE, context)


def unbind(modules: Iterable[nn.Module]) -> None:
    """Undoes `bind`."""
    for module in modules:
        if hasattr(module, _CONTEXT_ATTRIBUTE):
            delattr(module, _CONTEXT_ATTRIBUTE)


def mark(modules: Iterable[nn.Module], attending: Attending) -> None:
    """Notes what `modules` attend to."""
    for module in modules:
        setattr(module, _ATTENDING_ATTRIBUTE, attending)


def context_of(module: nn.Module) -> AttentionContext | None:
    """Returns the context that `module` is bound to; None if it is not bound."""
    return getattr(module, _CONTEXT_ATTRIBUTE, None)


def register_attention() -> None:
    """Registers IMPLEMENTATION_NAME with `transformers`, for attention and not for masks.

    Positions and block tables define which tokens attend to which. For an implementation without a
    mask function `transformers` makes no mask. With one, it would first ask the device, in each
    forward pass, whether positions begin anew, and wait for the answer.
    """
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION_NAME, _attention_forward)


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Attends as `transformers` calls it, with [1, H, T, D], [1, G, T, D], [1, G, T, E].

    Returns ([1, T, H, E], None). Raises ModelUnsupported for an unknown argument that would change
    the result.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    attending: Attending | None = getattr(module, _ATTENDING_ATTRIBUTE, None)
    if attending is Attending.ENCODER:
        return _attend_to_all(query, key, value, scale, kwargs), None
    relative_bias = getattr(module, RELATIVE_BIAS, None)
    if attending is Attending.CROSS or relative_bias is not None:
        # Of cross attention it is zeros; otherwise the module's own bias is used.
        kwargs.pop("position_bias", None)
    context: AttentionContext = getattr(module, _CONTEXT_ATTRIBUTE)
    if attending is not Attending.CROSS:
        _refuse_unknown_arguments(module, attention_mask, kwargs, sees_later=context.sees_later)
    options = AttentionOptions(
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        relative_bias=relative_bias,
    )
    attend = context.attend if attending is None else context.attend_to_encoder
    attended = attend(
        module, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), options
    )
    return attended.unsqueeze(0), None


def _attend_to_all(
    query: Tensor, key: Tensor, value: Tensor, scale: float, kwargs: dict[str, Any]
) -> Tensor:
    """Attends as an encoder does, in which one sequence is alone. Returns [1, T, H, E]."""
    bias: Tensor | None = kwargs.get("position_bias")
    attended = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, scale=scale
    )
    return attended.transpose(1, 2)


def _refuse_unknown_arguments(
    module: nn.Module, attention_mask: Tensor | None, kwargs: dict[str, Any], *, sees_later: bool
) -> None:
    name = type(module).__name__
    if attention_mask is not None:
        raise ModelUnsupported(f"{name} builds its own attention mask")
    if not sees_later and False in (kwargs.get("is_causal"), getattr(module, "is_causal", None)):
        raise ModelUnsupported(f"{name} is not causal")
    for argument, argument_value in kwargs.items():
        if argument not in _IGNORED_ARGUMENTS and argument_value is not None:
            raise ModelUnsupported(
                f"{name} passes {argument!r}, which paged attention does not support"
            )


# -- Probe runs through paged attention on scratch blocks ------------------------------------------
#
# They find out how a model attends.
#
# Shape letters: Q sequences, L tokens of each, V vocabulary, T tokens of a chunk, H query
# heads, G key/value heads, D size of a query or key head, E size of a value head.

SCRATCH_BLOCK_SIZE = 8

# Input tokens [T] and their positions [T] of a batch -> logits [T, V].
Forward = Callable[[Tensor, Tensor, PagedBatch], Tensor]


@dataclass(slots=True)
class ProbeContext:
    """Attends on scratch pools that are created for each module at its first attention.

    `rounding_noise` > 0 changes each output by that ratio, up or down, to show the effect of
    rounding.
    """

    sees_later: ClassVar[bool] = False
    num_blocks: int
    rounding_noise: float = 0.0
    pools: dict[nn.Module, tuple[Tensor, Tensor]] = field(default_factory=dict)
    options: dict[nn.Module, AttentionOptions] = field(default_factory=dict)
    _batch: PagedBatch | None = None
    _attended: set[nn.Module] = field(default_factory=set)

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """Shape of each module's keys and values per token, in the order of the forward pass."""
        return tuple(
            LayerShape(key.shape[2], key.shape[3], value.shape[3])
            for key, value in self.pools.values()
        )

    def begin_forward(self, batch: PagedBatch) -> None:
        """Sets the batch of the next forward pass."""
        self._batch = batch
        self._attended.clear()

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Attends on the scratch pools.

        Raises ModelUnsupported if `module` attends a second time in one forward pass.
        """
        assert self._batch is not None, "begin_forward comes before the forward pass"
        if module in self._attended:
            raise ModelUnsupported(f"{type(module).__name__} attends twice in one forward pass")
        self._attended.add(module)
        if module not in self.pools:
            self.pools[module] = (self._new_pool(key), self._new_pool(value))
            self.options[module] = options
        key_pool, value_pool = self.pools[module]
        reference.write_kv(key, value, key_pool, value_pool, self._batch)
        output = reference.paged_attention(query, key_pool, value_pool, self._batch, options)
        if self.rounding_noise:
            # Signs of a sine look random and are the same each time.
            index = torch.arange(output.numel(), device=output.device, dtype=torch.float64)
            signs = torch.sin(index * 12.9898).sign().view(output.shape)
            output = (output * (1 + self.rounding_noise * signs)).to(output.dtype)
        return output

    def attend_to_encoder(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Attends on blocks made of `key` and `value`, in which each token is a row."""
        del module
        num_tokens, num_keys = len(query), len(key)
        pools = []
        for heads in (key, value):
            pool = heads.new_zeros(-(-num_keys // SCRATCH_BLOCK_SIZE), *self._block_of(heads))
            pool.flatten(0, 1)[:num_keys] = heads
            pools.append(pool)
        tables = torch.arange(len(pools[0])).expand(num_tokens, -1)
        computed, new = (torch.full((num_tokens,), n) for n in (num_keys - 1, 1))
        batch = build_paged_batch(tables, computed, new, SCRATCH_BLOCK_SIZE, query.device)
        key_pool, value_pool = pools
        return reference.paged_attention(query, key_pool, value_pool, batch, options)

    def _new_pool(self, heads: Tensor) -> Tensor:
        return heads.new_zeros(self.num_blocks, *self._block_of(heads))

    @staticmethod
    def _block_of(heads: Tensor) -> tuple[int, ...]:
        return (SCRATCH_BLOCK_SIZE, *heads.shape[1:])


def num_scratch_blocks(tokens: Tensor, block_size: int = SCRATCH_BLOCK_SIZE) -> int:
    """Returns the number of blocks that `run_in_steps` uses for `tokens` [Q, L]."""
    return tokens.shape[0] * -(-tokens.shape[1] // block_size)


def run_in_steps(
    tokens: Tensor,
    forward: Forward,
    block_size: int = SCRATCH_BLOCK_SIZE,
    starts: Tensor | None = None,
    *,
    is_cut: bool = True,
) -> Tensor:
    """Computes float32 logits [Q, L, V] of `tokens` [Q, L] in two steps, sequences side by side.

    Without `is_cut` one step computes all tokens. Block tables are a shuffle of all blocks below
    `num_scratch_blocks(tokens, block_size)`. `starts`: [Q], position of each sequence's first
    token; there is nothing before it.
    """
    num_sequences, length = tokens.shape
    num_blocks = num_scratch_blocks(tokens, block_size)
    block_ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))
    block_tables = block_ids.view(num_sequences, -1)
    computed = torch.zeros(num_sequences, dtype=torch.int64)
    offsets = [0] * num_sequences if starts is None else starts.tolist()
    logits = torch.empty(0)
    whole = torch.full((num_sequences,), length)
    for new in _chunks(num_sequences, length) if is_cut else [whole]:
        batch = build_paged_batch(block_tables, computed, new, block_size, tokens.device)
        spans = list(zip(computed.tolist(), (computed + new).tolist(), strict=True))
        pieces = [offset + torch.arange(*span) for offset, span in zip(offsets, spans, strict=True)]
        positions = torch.cat(pieces).to(tokens.device)
        input_ids = torch.cat([tokens[q, start:end] for q, (start, end) in enumerate(spans)])
        found = forward(input_ids, positions, batch)
        if not logits.numel():
            shape = (num_sequences, length, found.shape[-1])
            logits = found.new_empty(shape, dtype=torch.float32)
        for of_sequence, span, part in zip(
            logits, spans, torch.split(found, new.tolist()), strict=True
        ):
            of_sequence[slice(*span)] = part
        computed = computed + new
    return logits


def probe_attention(
    model: Any,  # noqa: ANN401
    tokens: Tensor,
    rounding_noise: float = 0.0,
    starts: Tensor | None = None,
    *,
    is_cut: bool = True,
) -> tuple[Tensor, ProbeContext]:
    """Returns logits [Q, L, V] of `tokens` [Q, L] through paged attention, and the context.

    They are computed as by `run_in_steps`. The context tells how the modules attended. `model` must
    be switched to our attention; it is unbound afterwards. Raises ModelUnsupported for a model that
    paged attention cannot serve.
    """
    context = ProbeContext(num_scratch_blocks(tokens), rounding_noise)

    def forward(input_ids: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        context.begin_forward(batch)
        output = model(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        logits: Tensor = output.logits[0]
        return logits

    modules = list(model.modules())
    bind(modules, context)
    try:
        return run_in_steps(tokens, forward, starts=starts, is_cut=is_cut), context
    finally:
        unbind(modules)


def _chunks(num_sequences: int, length: int) -> Iterator[Tensor]:
    """Yields the numbers of new tokens [Q] of each step; they add up to `length` for each sequence.

    Two steps are enough to notice lost state between them, and each costs a pass over the weights.
    In the first step the first sequence has half of its tokens, each other sequence one.
    """
    first = torch.ones(num_sequences, dtype=torch.int64)
    first[0] = max(1, length // 2)
    yield first
    if length > 1:
        yield length - first
