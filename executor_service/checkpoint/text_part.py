"""The text part of a multimodal model, which is served for text alone.

Where `transformers` has a causal language model of the text part's own type (a Llama in a LLaVA),
that is made of the wrapper's modules, and runs in whatever runs such a model. Elsewhere the wrapper
itself is served, without the parts that a text does not pass. Either has to say exactly what the
whole wrapper says of a text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from executor_service.device.errors import is_out_of_memory
from executor_service.errors import ModelUnsupported, one_line
from executor_service.model.model_support import check_model_class
from executor_service.trials.logit_error import relative_error
from executor_service.trials.trial_tokens import near_tokens

_log = logging.getLogger(__name__)

# The same modules compute the same numbers in the same order; only the way to them differs.
_TOLERANCE = 1e-5


def wrapper_class(config: Any, architectures: Sequence[str]) -> type | None:  # noqa: ANN401
    """The class of `transformers` that is a multimodal model with a text part; None if none is.

    `architectures`: as for `check_kind`.
    """
    from transformers.models.auto import modeling_auto

    mapping: Any = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING
    if type(config) not in mapping:
        return None
    found: type = mapping[type(config)]
    is_named = any(_plain(name) == _plain(found.__name__) for name in architectures)
    return found if is_named or not architectures else None


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def causal_classes(config: Any) -> dict[str, type]:  # noqa: ANN401
    """The causal language models that transformers has for the type of `config`, by name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return {}
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return {each.__name__: each for each in (found if isinstance(found, tuple) else (found,))}


def is_causal(config: Any, architectures: Sequence[str]) -> bool:  # noqa: ANN401
    """Whether transformers has a causal language model of this type, under a name of these."""
    classes = causal_classes(config)
    return bool(classes) and (not architectures or any(name in classes for name in architectures))


@torch.inference_mode()
def text_part(wrapper: Any) -> Any:  # noqa: ANN401
    """What of `wrapper`, a multimodal model with its weights, is served for text.

    The wrapper may be taken apart. Raises ModelUnsupported if it takes no text alone.
    """
    name = type(wrapper).__name__
    text_config = wrapper.config.get_text_config(decoder=True)
    tokens = near_tokens(wrapper, text_config, _num_positions(text_config)).tokens
    used: set[nn.Module] = set()
    hooks = [
        module.register_forward_hook(lambda m, *_: used.add(m)) for module in wrapper.modules()
    ]
    try:
        expected = _logits(wrapper, tokens)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # Of models that need an image, say.
        raise ModelUnsupported(
            f"{name}: its own code in transformers takes no text alone with this config.json"
            f" ({one_line(error)}): not served; served would be a model that does"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    for causal in _as_causal_models(wrapper, text_config):
        if _says(causal, tokens, expected):
            _log.info("text_part_served wrapper=%s as=%s", name, type(causal).__name__)
            return causal
    left_out = _leave_out(wrapper, used)
    if not _says(wrapper, tokens, expected):
        raise ModelUnsupported(
            f"{name}: it says something else without its {', '.join(left_out)}: not served; served"
            " would be a model whose text part stands by itself"
        )
    _log.info("text_part_served wrapper=%s without=%r", name, ", ".join(left_out))
    return wrapper


def _as_causal_models(wrapper: Any, text_config: Any) -> Iterable[Any]:  # noqa: ANN401
    """The wrapper's language model as causal language models of its own type."""
    decoder = _decoder(wrapper)
    head = wrapper.get_output_embeddings()
    for model_class in causal_classes(text_config).values():
        if isinstance(decoder, model_class):
            yield decoder
            continue
        try:
            check_model_class(model_class)
            with torch.device("meta"):
                make: Any = model_class
                causal = make(text_config)
            prefix = causal.base_model_prefix
            if type(getattr(causal, prefix)) is not type(decoder) or head is None:
                continue
            setattr(causal, prefix, decoder)
            causal.set_output_embeddings(head)
        except (ModelUnsupported, AttributeError, NotImplementedError, TypeError, ValueError):
            continue
        if not any(tensor.is_meta for tensor in (*causal.parameters(), *causal.buffers())):
            yield causal.eval()


def _decoder(wrapper: Any) -> Any:  # noqa: ANN401
    inner = getattr(wrapper, "model", wrapper)
    return getattr(inner, "language_model", None) or getattr(inner, "text_model", None)


def _leave_out(wrapper: Any, used: set[nn.Module]) -> list[str]:  # noqa: ANN401
    """Replaces parts that hold weights and were not `used`. Returns their names."""
    left_out = []
    base = getattr(wrapper, "model", None)
    for parent in (wrapper, base) if isinstance(base, nn.Module) else (wrapper,):
        for name, part in list(parent.named_children()):
            has_weights = next(part.parameters(), None) is not None
            if has_weights and used.isdisjoint(part.modules()):
                setattr(parent, name, nn.Identity())
                left_out.append(name)
    return left_out


def _says(model: Any, tokens: Tensor, expected: Tensor) -> bool:  # noqa: ANN401
    """Whether `model` gives the `expected` logits [Q, L, V] of `tokens` [Q, L]."""
    try:
        logits = _logits(model, tokens)
    except Exception as error:
        # The models' own code may raise anything.
        _log.info(
            "text_part_not_served_as model=%s reason=%r", type(model).__name__, one_line(error)
        )
        return False
    if logits.shape != expected.shape:
        return False
    return relative_error(expected, logits) <= _TOLERANCE


def _logits(model: Any, tokens: Tensor) -> Tensor:  # noqa: ANN401
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits.float()
    return logits


def _num_positions(text_config: Any) -> int:  # noqa: ANN401
    positions = getattr(text_config, "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else 2048
