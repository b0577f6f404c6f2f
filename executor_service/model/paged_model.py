"""Interfaces of models whose attention goes through the KV pools, and the one of `transformers`.

Shape letters: R rows of a pass, m most tokens of a row, S rows that sample, P scored prompt tokens,
V vocabulary, T input tokens, W width of the model, K places between layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from executor_service.device import KVCache
from executor_service.errors import ModelUnsupported
from executor_service.model.adapted_linears import AdaptedLinears, linear_slots
from executor_service.model.adapter import Adapter
from executor_service.model.adapter_slots import AdapterSlots, ChooseAdding
from executor_service.model.encoder_decoder import EncoderDecoder
from executor_service.model.input_batch import InputBatch
from executor_service.model.loaded_model import LoadedModel
from executor_service.model.transformers_attention import StepContext, bind
from splitserve_kernels import reference
from splitserve_kernels.decoder_inputs import RunRows
from splitserve_kernels.paged_batch import AttentionBackend, build_paged_batch


class PagedModel(Protocol):
    """Computes the tokens of a batch, reading and writing the KV pools."""

    def logits(self, batch: InputBatch) -> Tensor:
        """Returns logits [S + P, V] of the tokens at `batch.logits_index`.

        They are float32, or in the model's dtype: who stores them as float32 converts them on the
        way. Of a model that returns vectors, V is `LoadedModel.num_outputs`. The next call may
        overwrite them.
        """
        ...


@runtime_checkable
class RunningModel(PagedModel, Protocol):
    """PagedModel that also draws tokens, and runs on with them by itself."""

    @property
    def can_run(self) -> bool:
        """Whether `decode_run` may be called."""
        ...

    def can_run_adapted(self, adapters: Collection[Adapter]) -> bool:
        """Returns whether rows of `decode_run` may have these adapters."""
        ...

    def decode_run(self, batch: InputBatch, rows: RunRows) -> Tensor:
        """Returns the tokens, [R, m] int32 on the device, that the rows of `batch` get.

        Every row of `batch` has one input token, whose logits `batch` asks for. The block tables
        have slots for all tokens that `rows` permits. A row gets its permitted number of tokens,
        and -1 after them. It ends earlier after a stop token, and at logits that are NaN, +inf or
        only -inf, for which it gets -1. Tokens after such an end are arbitrary, and so is the KV
        written for them, within the row's slots. All other tokens and KV, up to the slot before the
        last token's, are the same as from as many passes of one token. If `rows.after_token` ends
        the run, the tokens after that are -1.
        """
        ...


@runtime_checkable
class EncodingModel(PagedModel, Protocol):
    """PagedModel that may have an encoder (`LoadedModel.has_encoder`)."""

    def encode(self, encoder_input: Tensor, blocks: Tensor) -> None:
        """Encodes an input, and writes keys and values of all layers into `blocks`.

        `encoder_input`: token ids [E] int64, or features [M, F] float32 of audio: M mel bins of F
        frames.
        """
        ...


# Takes the states [K, T, W] of the input tokens of a pass, and the slots [T] int64 of these tokens.
# The next pass may overwrite both.
TakeStates = Callable[[Tensor, Tensor], None]


@runtime_checkable
class RevealingModel(PagedModel, Protocol):
    """PagedModel that shows hidden states between its layers."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Returns the embeddings, [T, W], of `token_ids` [T] int64."""
        ...

    def reveal(self, layers: Sequence[int], take: TakeStates) -> None:
        """Calls `take` after each later pass with the inputs of each of `layers`.

        `layers`: K indexes; the number of layers stands for the output of the last one. Raises
        ModelUnsupported if the model has no such places.
        """
        ...


@runtime_checkable
class AdaptingModel(PagedModel, Protocol):
    """PagedModel that may apply adapters."""

    @property
    def takes_adapters(self) -> bool:
        """Whether tokens of a batch may have adapters."""
        ...

    def prepare_adapter(self, adapter: Adapter) -> None:
        """Prepares an adapter, so that its first pass is not delayed. Any thread may call it.

        Raises ValueError or RuntimeError if the adapter does not fit the model.
        """
        ...


@runtime_checkable
class SlottedModel(AdaptingModel, Protocol):
    """AdaptingModel whose adapters have slots: a recorded pass serves any of them.

    That is said of adapters that change linear layers only.
    """

    @property
    def slots(self) -> AdapterSlots | None:
        """Adapter slots of the model; None if its adapters have none."""
        ...


def slots_of(model: PagedModel) -> AdapterSlots | None:
    """Returns the slots of a model's adapters; None if there are none."""
    return model.slots if isinstance(model, SlottedModel) else None


def takes_adapters(model: PagedModel) -> bool:
    """Returns whether tokens of a batch for `model` may have adapters."""
    return isinstance(model, AdaptingModel) and model.takes_adapters


class TransformersModel:
    """A model of `transformers` with paged attention. A RevealingModel and an AdaptingModel."""

    def __init__(
        self,
        loaded: LoadedModel,
        cache: KVCache,
        backend: AttentionBackend,
        slots: AdapterSlots | None = None,
    ) -> None:
        """Binds the attention modules of `loaded` to `cache`.

        `slots`: those of `linear_slots`, where kernels apply adapters; None for plain torch.
        """
        self.slots = slots
        self._loaded = loaded
        cross_modules: tuple[nn.Module, ...] = ()
        if isinstance(loaded.model, EncoderDecoder):
            loaded.model.serve()
            cross_modules = loaded.model.cross_modules
        self._cache = cache
        self._backend = backend
        self._context = StepContext(cache, backend, loaded.attention_modules, cross_modules)
        bind((*loaded.attention_modules, *cross_modules), self._context)
        self._adapted = AdaptedLinears(loaded, slots)
        self._revealed: tuple[LayerStates, TakeStates] | None = None

    @property
    def takes_adapters(self) -> bool:
        return bool(self._loaded.adapter_targets)

    def prepare_adapter(self, adapter: Adapter) -> None:
        if self.slots is None:
            self._adapted.prepare(adapter)
        else:
            self.slots.prepare(adapter)

    def logits(self, batch: InputBatch) -> Tensor:
        cross = batch.rows.cross
        if cross is not None:
            cross_batch = cross.batch(self._cache.block_size, self._cache.device)
        self._context.begin_forward(batch.paged, None if cross is None else cross_batch)
        keep = {"logits_to_keep": batch.logits_index} if self._loaded.keeps_logits else {}
        with self._adapted.applied(batch):
            output = self._loaded.model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                **keep,
            )
        if self._revealed is not None:
            states, take = self._revealed
            take(states.of_last_pass(), batch.paged.slot_mapping)
        logits: Tensor = output.logits[0]
        if not self._loaded.keeps_logits:
            logits = logits[batch.logits_index]
        # Some output heads are padded beyond the last token of the embedding.
        return logits[:, : self._loaded.num_outputs]

    def encode(self, encoder_input: Tensor, blocks: Tensor) -> None:
        model, device = self._loaded.model, self._cache.device
        assert isinstance(model, EncoderDecoder), "the executor supports cross attention"
        states = model.encode(encoder_input.to(device)[None])
        none, all_tokens = torch.zeros(1, dtype=torch.int64), torch.tensor([states.shape[1]])
        batch = build_paged_batch(blocks[None], none, all_tokens, self._cache.block_size, device)
        for layer, (key, value) in enumerate(model.cross_keys_and_values(states)):
            pools = self._cache.key_pools[layer], self._cache.value_pools[layer]
            self._backend.write_kv(key, value, *pools, batch, self._cache.scales[layer])

    def embed(self, token_ids: Tensor) -> Tensor:
        table: Any = self._loaded.model
        embeddings: Tensor = table.get_input_embeddings()(token_ids)
        return embeddings

    def reveal(self, layers: Sequence[int], take: TakeStates) -> None:
        loaded = self._loaded
        self._revealed = LayerStates(loaded.model, loaded.attention_modules, layers), take


MakeModel = Callable[[LoadedModel, KVCache], PagedModel]


def torch_model(loaded: LoadedModel, cache: KVCache) -> PagedModel:
    """Returns the model of `transformers`, attending in plain torch."""
    return TransformersModel(loaded, cache, reference)


def attending_with(
    backend: AttentionBackend, choose_adding: ChooseAdding = lambda: None
) -> MakeModel:
    """Returns a factory of `transformers` models that attend by `backend`.

    `choose_adding`: chooses kernels that apply adapters; without any, plain torch does.
    """

    def make_model(loaded: LoadedModel, cache: KVCache) -> PagedModel:
        return TransformersModel(loaded, cache, backend, linear_slots(loaded, choose_adding))

    return make_model


# -- Hidden states between the layers of a `transformers` model ------------------------------------
#
# Shape letters: K places between layers, T input tokens, W width of the model.

_STATES_ARGUMENT = "hidden_states"


class LayerStates:
    """Catches the inputs of some layers in each pass, by hooks."""

    def __init__(
        self, model: nn.Module, attention_modules: Sequence[nn.Module], layers: Sequence[int]
    ) -> None:
        """Adds the hooks. `layers`: K indexes; the number of layers for the output of the last.

        `attention_modules`: one in each layer of `model`, in their order. Raises ModelUnsupported
        if the layers are not one stack.
        """
        modules = _stack_of(model, attention_modules)
        self._layers = tuple(layers)
        self._caught: dict[int, Tensor] = {}
        for layer in set(layers):
            if layer < len(modules):
                modules[layer].register_forward_pre_hook(self._before(layer), with_kwargs=True)
            else:
                modules[-1].register_forward_hook(self._behind(layer))

    def of_last_pass(self) -> Tensor:
        """Returns the states of the last pass and forgets them.

        They are [K, T, W], in the order of `layers`.
        """
        states = torch.stack([self._caught[layer] for layer in self._layers])
        self._caught.clear()
        return states

    def _before(self, layer: int) -> Callable[[nn.Module, Any, dict[str, Any]], None]:
        def catch(_module: nn.Module, arguments: Any, named: dict[str, Any]) -> None:  # noqa: ANN401
            states: Tensor = arguments[0] if arguments else named[_STATES_ARGUMENT]
            self._caught[layer] = states[0]

        return catch

    def _behind(self, layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def catch(_module: nn.Module, _arguments: Any, returned: Any) -> None:  # noqa: ANN401
            states: Tensor = returned[0] if isinstance(returned, tuple) else returned
            self._caught[layer] = states[0]

        return catch


def _stack_of(model: nn.Module, attention_modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns the layer around each of `attention_modules`."""
    layer_of: dict[nn.Module, nn.Module] = {}
    for stack in model.modules():
        if isinstance(stack, nn.ModuleList):
            for layer in stack:
                for module in layer.modules():
                    # The outermost list comes first.
                    layer_of.setdefault(module, layer)
    layers = [layer_of[module] for module in attention_modules if module in layer_of]
    if len(set(layers)) != len(attention_modules):
        raise ModelUnsupported(f"{type(model).__name__}: the layers do not form one stack")
    return layers
