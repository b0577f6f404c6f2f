"""Encoder-decoder models of `transformers`, called like decoder-only ones.

The decoder's own tokens attend through the pools like those of any model. Its cross attention reads
cross blocks, which hold the keys and values that the cross attention of each layer makes of the
encoder's output for tokens or audio. The code of `transformers` computes everything else: each
token of the decoder gets its position in place of the one that the code would count, and the place
of the encoder's output is taken by a row of zeros, of which no keys and values are computed.

Shape letters: Q sequences, L decoder tokens of each, V vocabulary, W width of the model, E encoder
tokens, P positions, H query heads, n distances, G key/value heads, D head size, M mel bins, F
frames.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from executor_service.errors import ModelUnsupported
from executor_service.model.transformers_attention import (
    RELATIVE_BIAS,
    Attending,
    bind,
    context_of,
    mark,
    unbind,
)
from executor_service.steps import AudioInfo
from splitserve_kernels.paged_batch import AttentionOptions

_CROSS_NAMES = ("encoder_attn", "EncDecAttention")
_SELF_NAMES = ("self_attn", "SelfAttention")
# Of cross attention, what makes keys and values.
_PROJECTIONS = ("k_proj", "v_proj", "k", "v")
_POSITIONS = "embed_positions"
_FINAL_BIAS = "final_logits_bias"
# Classes of models, and of their attention that bypasses the interface of transformers and that is
# replaced.
REPLACED_ATTENTION = {"LEDForConditionalGeneration": "LEDDecoderAttention"}
_NUM_TRIED_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Logits:
    """Output of a pass. `logits`: [Q, L, V], or of the kept tokens alone."""

    logits: Tensor


class EncoderDecoder(nn.Module):
    """An encoder-decoder model that is called as a causal language model is.

    Until `serve`, the decoder attends to the encoder's output for some random input. `audio`: None
    if the encoder takes tokens.
    """

    encoder_states: Tensor

    def __init__(
        self,
        whole: Any,  # noqa: ANN401
        max_model_len: int,
        audio: AudioInfo | None = None,
    ) -> None:
        """Takes over `whole`, a model of `transformers`. Raises ModelUnsupported."""
        super().__init__()
        self.whole = whole
        self.audio = audio
        self.config = whole.config
        self.dtype: torch.dtype = whole.dtype
        _replace_attention(whole)
        mark(whole.get_encoder().modules(), Attending.ENCODER)
        mark(self.cross_modules, Attending.CROSS)
        for module in self.attention_modules:
            causal: Any = module
            # Some versions of transformers do not say so of UMT5; the trial shows that it is so.
            causal.is_causal = True
        _join_final_bias(whole)
        _keep_relative_biases(self.attention_modules)
        self._positions = _keep_positions(whole, max_model_len)
        _add_switches(self.cross_modules)
        if audio is None:
            tried = torch.randint(3, whole.config.vocab_size, (1, _NUM_TRIED_TOKENS))
        else:
            tried = torch.randn(1, audio.num_mel_bins, audio.num_frames)
        states = self.encode(tried.to(self.device))[:, :_NUM_TRIED_TOKENS].clone()
        self.register_buffer("encoder_states", states, False)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        found: torch.device = self.whole.device
        return found

    @property
    def attention_modules(self) -> tuple[nn.Module, ...]:
        """The modules in which the layers of the decoder attend to its own tokens."""
        return tuple(_found(layer, _SELF_NAMES) for layer in _layers(self.whole.get_decoder()))

    @property
    def cross_modules(self) -> tuple[nn.Module, ...]:
        """The modules in which the layers of the decoder attend to the encoder's tokens."""
        return tuple(_found(layer, _CROSS_NAMES) for layer in _layers(self.whole.get_decoder()))

    def get_input_embeddings(self) -> nn.Module:
        """Returns the embedding of tokens."""
        found: nn.Module = self.whole.get_input_embeddings()
        return found

    def get_output_embeddings(self) -> nn.Module | None:
        """Returns the output head."""
        found: nn.Module | None = self.whole.get_output_embeddings()
        return found

    def set_attn_implementation(self, name: str) -> None:
        """Switches attention to an implementation of `transformers`, by name."""
        if type(self.whole).__name__ in REPLACED_ATTENTION:
            # Its encoder has attention of its own.
            self.config._attn_implementation = name
            return
        # Some versions of transformers leave out parts with configurations of their own.
        for part in (self.whole, self.whole.get_encoder(), self.whole.get_decoder()):
            part.set_attn_implementation(name)

    @property
    def max_encoder_tokens(self) -> int | None:
        """Limit of encoder tokens by the embedded positions; None without such embeddings."""
        if self.audio is not None:
            return self.audio.num_positions
        positions: Any = getattr(self.whole.get_encoder(), _POSITIONS, None)
        if not isinstance(positions, nn.Embedding):
            return None
        return positions.num_embeddings - int(getattr(positions, "offset", 0))

    def serve(self) -> None:
        """Ends the trials: cross attention reads what a context has, and no encoder output."""
        self.encoder_states = self.encoder_states.new_zeros(1, 1, self.encoder_states.shape[2])
        self._switch(is_on=False)

    def _switch(self, *, is_on: bool) -> None:
        for module in self.whole.get_decoder().modules():
            if isinstance(module, _Projection):
                module.is_on = is_on

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: Tensor | None = None,
    ) -> Logits:
        """Computes logits of decoder tokens `input_ids` [Q, L]; nothing is cached.

        `position_ids`: [Q, L]; None for those from 0 on. `logits_to_keep`: indexes of the tokens
        whose logits are returned; None for all.
        """
        from transformers.modeling_outputs import BaseModelOutput

        del use_cache
        num_sequences, length = input_ids.shape
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device)[None]
        if self._positions is not None:
            self._positions.of_pass = position_ids
        states = self.encoder_states.expand(num_sequences, -1, -1)
        output = self.whole(
            encoder_outputs=BaseModelOutput(last_hidden_state=states),
            decoder_input_ids=input_ids,
            use_cache=False,
        )
        logits: Tensor = output.logits
        return Logits(logits if logits_to_keep is None else logits[:, logits_to_keep])

    def encode(self, encoder_input: Tensor) -> Tensor:
        """Returns the encoder's output [1, E, W] for token ids [1, E], or features [1, M, F]."""
        encoder = self.whole.get_encoder()
        if self.audio is None:
            output = encoder(input_ids=encoder_input)
        else:
            output = encoder(encoder_input.to(self.dtype))
        states: Tensor = output.last_hidden_state
        return states

    def cross_keys_and_values(self, states: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields keys and values, [E, G, D] each, that each layer makes of `states` [1, E, W]."""
        query = states.new_zeros(1, 1, states.shape[2])
        self._switch(is_on=True)
        try:
            for module in self.cross_modules:
                context, caught = context_of(module), _Caught()
                bind([module], caught)
                try:
                    module(query, key_value_states=states)
                finally:
                    unbind([module]) if context is None else bind([module], context)
                yield caught.key, caught.value
        finally:
            self._switch(is_on=False)


class _Caught:
    """Takes the keys and values that a module attends to."""

    sees_later = False
    key: Tensor
    value: Tensor

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        raise AssertionError("cross attention alone is caught")

    def attend_to_encoder(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        del module, options
        self.key, self.value = key, value
        return query.new_zeros(*query.shape[:2], value.shape[2])


# -- parts of the models' code that are replaced ---------------------------------------------------


def _layers(decoder: nn.Module) -> nn.ModuleList:
    """Returns the layers of a decoder."""
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList):
            return module
    raise _not_served(decoder, "has no list of layers")


def _found(layer: nn.Module, names: tuple[str, ...]) -> nn.Module:
    found: nn.Module
    for name, found in layer.named_modules():
        if name.rpartition(".")[2] in names:
            return found
    raise _not_served(layer, f"has no {' or '.join(names)}")


def _not_served(part: nn.Module, reason: str) -> ModelUnsupported:
    return ModelUnsupported(
        f"{type(part).__name__} {reason}: not served; supported: an encoder-decoder model whose"
        " decoder is built as those of T5 or BART"
    )


def _replace_attention(whole: Any) -> None:  # noqa: ANN401
    """Replaces the decoder's attention if it is one of REPLACED_ATTENTION.

    The attention of BART computes the same, with the same weights.
    """
    from transformers.models.bart.modeling_bart import BartAttention

    replaced = REPLACED_ATTENTION.get(type(whole).__name__)
    for parent in list(whole.get_decoder().modules()):
        for name, module in list(parent.named_children()):
            if type(module).__name__ != replaced:
                continue
            bypassing: Any = module
            with torch.device("meta"):
                attention = BartAttention(
                    bypassing.embed_dim,
                    bypassing.num_heads,
                    is_decoder=bypassing.is_decoder,
                    bias=bypassing.q_proj.bias is not None,
                    config=whole.config,
                    layer_idx=bypassing.layer_idx,
                )
            attention.load_state_dict(module.state_dict(), assign=True)
            attention.eval().register_forward_hook(_with_cache)
            setattr(parent, name, attention)


def _with_cache(_module: object, _arguments: object, output: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the output in LED's form, with the cache, of which there is none."""
    return (*output, None)


def _join_final_bias(whole: Any) -> None:  # noqa: ANN401
    """Makes a bias that is added to the logits the bias of the output head."""
    bias, head = getattr(whole, _FINAL_BIAS, None), whole.get_output_embeddings()
    if isinstance(bias, Tensor) and head.bias is None:
        head.bias = nn.Parameter(bias.detach()[0].clone(), requires_grad=False)
        setattr(whole, _FINAL_BIAS, bias.new_zeros(1, 1))


class _Projection(nn.Module):
    """A linear layer that can be switched off: then its outputs are zeros, without its weights."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.is_on = True
        self._num_outputs = linear.out_features

    def forward(self, inputs: Tensor) -> Tensor:
        if self.is_on:
            outputs: Tensor = self.linear(inputs)
            return outputs
        return inputs.new_zeros(*inputs.shape[:-1], self._num_outputs)


def _add_switches(modules: tuple[nn.Module, ...]) -> None:
    """Gives switches to the layers that make keys and values for `modules` of cross attention."""
    for module in modules:
        for name, linear in list(module.named_children()):
            if name in _PROJECTIONS and isinstance(linear, nn.Linear):
                setattr(module, name, _Projection(linear))


class _Positions(nn.Module):
    """Embeddings of positions. `of_pass`: [Q, L], the positions of the tokens of a pass."""

    table: Tensor
    of_pass: Tensor

    def __init__(self, table: Tensor) -> None:
        """`table`: [P, W]."""
        super().__init__()
        self.register_buffer("table", table, persistent=False)

    def forward(self, *_arguments: object, **_named: object) -> Tensor:
        return self.table[self.of_pass]


class _PositionsCaught(Exception):
    pass


def _keep_positions(whole: Any, num_positions: int) -> _Positions | None:  # noqa: ANN401
    """Replaces the module that counts positions in the decoder; returns None if it has none.

    The embeddings of all positions are those that the decoder gets for so many tokens.
    """
    decoder = whole.get_decoder()
    module = getattr(decoder, _POSITIONS, None)
    if module is None:
        return None
    caught: list[Tensor] = []

    def catch(_module: nn.Module, _arguments: object, embeddings: Tensor) -> None:
        caught.append(embeddings)
        raise _PositionsCaught

    hook = module.register_forward_hook(catch)
    width = whole.config.hidden_size
    try:
        decoder(
            input_ids=torch.full((1, num_positions), 3, device=whole.device),
            encoder_hidden_states=torch.zeros(1, 1, width, dtype=whole.dtype, device=whole.device),
            use_cache=False,
        )
    except _PositionsCaught:
        pass
    finally:
        hook.remove()
    if not caught:
        raise _not_served(decoder, f"does not use its {_POSITIONS}")
    kept = _Positions(caught[0].reshape(num_positions, -1).to(whole.dtype).clone())
    setattr(decoder, _POSITIONS, kept)
    return kept


def _keep_relative_biases(modules: tuple[nn.Module, ...]) -> None:
    """Adds to `modules` the bias [H, n] of each distance, if their scores have such biases.

    Modules without biases of their own have those of the module before.
    """
    bias: Tensor | None = None
    for each in modules:
        module: Any = each
        if getattr(module, "has_relative_attention_bias", False):
            size = module.relative_attention_max_distance + 1
            # Of the last query, the biases of keys from the first on.
            bias = module.compute_bias(size, size)[0, :, -1].flip(-1).detach().clone()
        if bias is not None:
            module.register_buffer(RELATIVE_BIAS, bias, persistent=False)
            if "position_bias" in inspect.signature(module.forward).parameters:
                module.register_forward_pre_hook(_leave_out_bias, with_kwargs=True)


def _leave_out_bias(
    module: Any,  # noqa: ANN401
    arguments: tuple[object, ...],
    named: dict[str, Any],
) -> tuple[tuple[object, ...], dict[str, Any]] | None:
    """Spares a module that is bound to a context the biases of all pairs of tokens."""
    if context_of(module) is None:
        return None
    nothing = getattr(module, RELATIVE_BIAS).new_zeros(1, module.n_heads, 1, 1)
    return arguments, named | {"position_bias": nothing}
