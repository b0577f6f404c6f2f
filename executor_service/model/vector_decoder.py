"""Decoders that return hidden states where generating models return logits.

So everything that serves a causal language model serves them, too: paged attention, prefix caches
and decoders of our own.

Shape letters: Q sequences, L tokens of each, W width of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from executor_service.errors import ModelUnsupported
from executor_service.model.encoder_decoder import Logits
from executor_service.model.loaded_model import check_model_class

_NUM_TRIED_TOKENS = 8
# Enlarges hidden states for the comparison, so that a cap of logits shows.
_ENLARGED = 64
# Largest relative difference that counts as rounding.
_TOLERANCE = 1e-2


class VectorDecoder(nn.Module):
    """A decoder without an output head, called as a causal language model is."""

    def __init__(self, base: Any) -> None:  # noqa: ANN401
        """Takes over `base`, a model of `transformers` without a head."""
        super().__init__()
        self.base = base
        self.config = base.config
        self.dtype: torch.dtype = base.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        found: torch.device = self.base.device
        return found

    def get_input_embeddings(self) -> nn.Module:
        """Returns the embedding of tokens."""
        found: nn.Module = self.base.get_input_embeddings()
        return found

    def get_output_embeddings(self) -> None:
        """Returns None: there is no output head."""

    def set_attn_implementation(self, name: str) -> None:
        """Switches attention to an implementation of `transformers`, by name."""
        self.base.set_attn_implementation(name)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: Tensor | None = None,
    ) -> Logits:
        """Computes hidden states [Q, L, W] of tokens `input_ids` [Q, L], as `logits`.

        `position_ids`: [Q, L]; None for those from 0 on. `logits_to_keep`: indexes of the tokens
        whose states are returned; None for all.
        """
        output = self.base(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)
        states: Tensor = output.last_hidden_state
        return Logits(states if logits_to_keep is None else states[:, logits_to_keep])


def vector_decoder(base: Any, causal_class: type | None) -> Any:  # noqa: ANN401
    """Returns `base`, a decoder without a head, as a causal language model of hidden states.

    It is a `causal_class` with an output head that changes nothing, if that class computes nothing
    else behind the head; otherwise, or without such a class, a VectorDecoder.
    """
    causal = None if causal_class is None else _with_identity(base, causal_class)
    if causal is not None and _agrees(causal, base):
        return causal
    return VectorDecoder(base)


def _with_identity(base: Any, causal_class: Any) -> Any | None:  # noqa: ANN401
    try:
        check_model_class(causal_class)
        with torch.device("meta"):
            causal = causal_class(base.config)
        prefix = causal.base_model_prefix
        if type(getattr(causal, prefix)) is not type(base):
            return None
        setattr(causal, prefix, base)
        width = base.config.get_text_config(decoder=True).hidden_size
        head = nn.Linear(width, width, bias=False, dtype=base.dtype, device=base.device)
        head.weight = nn.Parameter(
            torch.eye(width, dtype=base.dtype, device=base.device), requires_grad=False
        )
        causal.set_output_embeddings(head)
    except (ModelUnsupported, AttributeError, NotImplementedError, TypeError, ValueError):
        return None
    if any(tensor.is_meta for tensor in (*causal.parameters(), *causal.buffers())):
        return None
    return causal.eval()


@torch.inference_mode()
def _agrees(causal: Any, base: Any) -> bool:  # noqa: ANN401
    num_tokens = base.get_input_embeddings().num_embeddings
    tokens = torch.arange(_NUM_TRIED_TOKENS, device=base.device)[None] % num_tokens
    states = base(input_ids=tokens, use_cache=False).last_hidden_state.float() * _ENLARGED
    head = causal.get_output_embeddings()
    head.weight *= _ENLARGED
    found = causal(input_ids=tokens, use_cache=False).logits.float()
    head.weight /= _ENLARGED
    limit = _TOLERANCE * states.abs().mean()
    return found.shape == states.shape and bool((found - states).abs().max() <= limit)
