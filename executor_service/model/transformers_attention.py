"""Our paged attention as an attention implementation of `transformers`.

The implementation is a pure function in a registry; what it works on (the step's batch and the
pools) hangs on each attention module, where `bind` put it. So two models in one process do not
meet, and there is no global state of a step.

Shape letters: T tokens of the flattened batch, H query heads, G key/value heads, D size of a query
or key head, E size of a value head.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor, nn

from executor_service.device.kv_cache import KVCache
from executor_service.errors import ModelUnsupported
from splitserve_kernels.paged_batch import AttentionBackend, AttentionOptions, PagedBatch

IMPLEMENTATION_NAME = "splitserve_paged"
_CONTEXT_ATTRIBUTE = "_splitserve_context"

# Arguments that models pass to an attention implementation and that change nothing here: what they
# say is either implied (causal, no dropout, positions) or for other implementations.
_IGNORED_ARGUMENTS = frozenset(
    {
        "cu_seq_lens_k",
        "cu_seq_lens_q",
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
    """What an attention module attends through."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Stores `key` [T, G, D] and `value` [T, G, E]; returns the output [T, H, E]."""
        ...


class StepContext:
    """Attends through the KV pools, for the batch of the step that runs now."""

    def __init__(
        self, cache: KVCache, backend: AttentionBackend, modules: Iterable[nn.Module]
    ) -> None:
        """`modules`: the attention modules, in the order of the layers of `cache`."""
        self._cache = cache
        self._backend = backend
        self._layers = {module: layer for layer, module in enumerate(modules)}
        self._batch: PagedBatch | None = None

    def begin_forward(self, batch: PagedBatch) -> None:
        """Sets the batch that the next forward pass is for."""
        self._batch = batch

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


def bind(modules: Iterable[nn.Module], context: AttentionContext) -> None:
    """Makes `modules` attend through `context` from now on."""
    for module in modules:
        setattr(module, _CONTEXT_ATTRIBUTE, context)


def unbind(modules: Iterable[nn.Module]) -> None:
    """Undoes `bind`."""
    for module in modules:
        if hasattr(module, _CONTEXT_ATTRIBUTE):
            delattr(module, _CONTEXT_ATTRIBUTE)


def context_of(module: nn.Module) -> AttentionContext | None:
    """What `module` attends through; None if it is not bound."""
    return getattr(module, _CONTEXT_ATTRIBUTE, None)


def register_attention() -> None:
    """Makes IMPLEMENTATION_NAME known to `transformers`, for attention and not for masks.

    Positions and block tables say who sees whom. For an implementation without a mask function
    `transformers` makes no mask; for one with it, it would first ask the device, in each forward
    pass, whether positions begin anew, and wait for the answer.
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
    """The signature that `transformers` calls: [1, H, T, D], [1, G, T, D], [1, G, T, E].

    Returns ([1, T, H, E], None). Raises ModelUnsupported for an argument that would change the
    result and that is unknown here.
    """
    _refuse_unknown_arguments(module, attention_mask, kwargs)
    context: AttentionContext = getattr(module, _CONTEXT_ATTRIBUTE)
    options = AttentionOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    attended = context.attend(
        module, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), options
    )
    return attended.unsqueeze(0), None


def _refuse_unknown_arguments(
    module: nn.Module, attention_mask: Tensor | None, kwargs: dict[str, Any]
) -> None:
    name = type(module).__name__
    if attention_mask is not None:
        raise ModelUnsupported(f"{name} builds an attention mask of its own")
    if False in (kwargs.get("is_causal"), getattr(module, "is_causal", None)):
        raise ModelUnsupported(f"{name} is not causal")
    for argument, argument_value in kwargs.items():
        if argument not in _IGNORED_ARGUMENTS and argument_value is not None:
            raise ModelUnsupported(f"{name} passes {argument!r}, which paged attention cannot do")
