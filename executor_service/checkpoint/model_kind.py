"""Check that a configuration describes a causal language model; text parts of multimodal models.

Every refusal says what the model is, that it is not served, and what would be.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from executor_service.device import is_out_of_memory
from executor_service.errors import ModelUnsupported, one_line
from executor_service.model import check_config, check_model_class
from executor_service.trials import near_tokens, relative_error

_log = logging.getLogger(__name__)

_SERVED = "supported: a decoder-only causal language model, such as LlamaForCausalLM"
_CAUSAL_ENDINGS = ("ForCausalLM", "LMHeadModel")
# Kind of a model by the end of its architecture's name; the first match counts.
_KIND_OF_ENDING = {
    "ForCausalLMEagle3": "EAGLE-3 head, a draft head for another model (--draft-model)",
    "ForMaskedLM": "bidirectional encoder for masked language modeling",
    "ForPreTraining": "bidirectional encoder with heads for pre-training",
    "ForNextSentencePrediction": "bidirectional encoder for next sentence prediction",
    "ForMultipleChoice": "multiple-choice classifier",
    "ForSequenceClassification": "sequence classifier or reward model, which scores texts",
    "ForTokenClassification": "token classifier, which labels tokens",
    "ForQuestionAnswering": "extractive question answering model",
    "RewardModel": "reward model, which scores texts",
    "Model": "model without a language model head, as embedding models (--task embed)",
}
# Types that are encoders unless is_decoder is set, beside masked language models.
_ENCODER_TYPES = frozenset({"bert-generation"})
# Types of speech models whose audio becomes features of a fixed size.
_SPEECH_TYPES = frozenset({"whisper"})
_MEDIA = ("vision", "image", "video", "audio", "speech", "vq")


def check_declared_kind(directory: Path, content: Mapping[str, Any]) -> None:
    """Raises ModelUnsupported if config.json rules out serving, before transformers reads it.

    `content`: contents of config.json in `directory`. Custom code is never run.
    """
    from transformers import CONFIG_MAPPING, __version__

    model_type = content.get("model_type")
    has_custom_code = bool(content.get("auto_map"))
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        if has_custom_code:
            _log.info(
                "custom_code_not_run model_type=%s: transformers' own code is used", model_type
            )
        return
    named = f"{directory}/config.json: model_type {model_type!r}"
    if has_custom_code:
        raise ModelUnsupported(
            f"{named} is custom code (auto_map), which is never run: not served; supported: a model"
            f" type built into transformers {__version__}"
        )
    if not isinstance(model_type, str):
        raise ModelUnsupported(f"{named} is not a string: not served; {_SERVED}")
    raise ModelUnsupported(
        f"{named} is unknown to transformers {__version__}: not served; supported: a model type"
        " built into it (a later version may have this one)"
    )


def check_kind(config: Any, architectures: Sequence[str]) -> None:  # noqa: ANN401
    """Raises ModelUnsupported unless `config` describes a causal language model.

    `config`: of `transformers`. `architectures`: the classes that config.json names; may be empty.
    """
    classes = causal_classes(config)
    what, would_be = _other_kind(config, architectures, classes)
    if what:
        named = f" ({', '.join(architectures)})" if architectures else ""
        raise ModelUnsupported(f"{config.model_type}: {what}{named}: not served; {would_be}")


def _other_kind(
    config: Any,  # noqa: ANN401
    architectures: Sequence[str],
    classes: Mapping[str, type],
) -> tuple[str, str]:
    """Returns the kind of a model that is not served, and what would be served.

    Returns two empty texts for a causal language model.
    """
    media = media_parts(config)
    if media and not is_causal(config, architectures):
        instead = _instead_of_multimodal(config, architectures)
        return (f"multimodal model (with {', '.join(media)})", instead) if instead else ("", "")
    would_be = _SERVED
    if encoder_decoder_class(config, architectures) is not None:
        return "", ""
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder model", would_be
    if _is_half_of_encoder_decoder(config):
        return "decoder half of an encoder-decoder model with its own position numbering", would_be
    if is_bidirectional(config):
        return "bidirectional encoder, whose tokens attend to later ones", would_be
    if not classes:
        return _kind_of(architectures) or "model type without a causal language model", would_be
    if is_causal(config, architectures) or _is_same_by_another_name(config, architectures):
        return "", ""
    class_name = next(iter(classes))
    kind = _kind_of(architectures) or f"code other than that of its model type ({class_name})"
    if getattr(config, "auto_map", None):
        kind += ", custom code, which is never run,"
    return kind, f"{_SERVED}, here {class_name}"


def encoder_decoder_class(config: Any, architectures: Sequence[str]) -> type | None:  # noqa: ANN401
    """Returns the class of `transformers` of an encoder-decoder model of texts or speech.

    Returns None for other models. `architectures`: as for `check_kind`.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    )

    mapping: Any = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    if takes_audio(config):
        mapping = MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING
    if not getattr(config, "is_encoder_decoder", False) or type(config) not in mapping:
        return None
    if media_parts(config):
        return None
    found: type = mapping[type(config)]
    return found if not architectures or found.__name__ in architectures else None


def takes_audio(config: Any) -> bool:  # noqa: ANN401
    """Returns whether `config` is of a speech model of a type that is served."""
    return config.model_type in _SPEECH_TYPES


def _kind_of(architectures: Sequence[str]) -> str | None:
    """Returns the kind that a class's name tells; None for a causal language model."""
    if not architectures or architectures[0].endswith(_CAUSAL_ENDINGS):
        return None
    name = architectures[0]
    kinds = (kind for ending, kind in _KIND_OF_ENDING.items() if name.endswith(ending))
    return next(kinds, "not a causal language model")


def _is_same_by_another_name(config: Any, architectures: Sequence[str]) -> bool:  # noqa: ANN401
    """Returns whether the class is that of the model type under another name than transformers'."""
    stems = (_plain(name.removesuffix(end)) for name in architectures for end in _CAUSAL_ENDINGS)
    return _plain(config.model_type) in stems


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _is_half_of_encoder_decoder(config: Any) -> bool:  # noqa: ANN401
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

    return type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING and not media_parts(config)


def is_bidirectional(config: Any) -> bool:  # noqa: ANN401
    """Returns whether tokens attend to later ones, as far as the configuration says."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

    if getattr(config, "is_decoder", None) is False and (
        type(config) in MODEL_FOR_MASKED_LM_MAPPING or config.model_type in _ENCODER_TYPES
    ):
        return True
    text_config = config.get_text_config(decoder=True)
    sees_later = getattr(text_config, "use_bidirectional_attention", None)
    # "vision" lets the parts of one image see each other; there is no image here.
    return sees_later not in (None, False, "vision") or (
        getattr(text_config, "is_causal", True) is False
    )


def media_parts(config: Any) -> list[str]:  # noqa: ANN401
    """Returns the parts for images and sounds that a model has beside its text part."""
    parts = getattr(type(config), "sub_configs", {})
    return [
        name
        for name in parts
        if name.startswith(_MEDIA) and getattr(config, name, None) is not None
    ]


def _instead_of_multimodal(config: Any, architectures: Sequence[str]) -> str:  # noqa: ANN401
    """Returns what would be served instead of a multimodal model.

    Returns an empty text if its text part is served.
    """
    text_config = config.get_text_config(decoder=True)
    if text_config is config:
        return _SERVED
    classes = causal_classes(text_config)
    wrapper = wrapper_class(config, architectures)
    try:
        if config.is_encoder_decoder or getattr(text_config, "is_encoder_decoder", False):
            raise ModelUnsupported(f"{text_config.model_type}: encoder-decoder model")
        for name in classes:
            check_kind(text_config, [name])
        check_config(text_config, text_config)
        for model_class in classes.values():
            check_model_class(model_class)
        if wrapper is not None:
            check_model_class(wrapper)
            return ""
        if not classes:
            raise ModelUnsupported(f"{text_config.model_type}: not a causal language model")
    except ModelUnsupported as error:
        reason = str(error).partition(": not served")[0]
        return f"nor is its text part supported ({reason}); {_SERVED}"
    return f"supported: its text part alone, saved as a checkpoint of {next(iter(classes))}"


# -- Text parts of multimodal models, served for text alone ----------------------------------------
#
# If `transformers` has a causal language model of the text part's own type (a Llama in a LLaVA),
# one is made of the wrapper's modules, and served like any such model. Otherwise the wrapper itself
# is served, without the parts that a text does not use. Either must give the same logits of a text
# as the whole wrapper.


# Largest relative error: the same modules compute the same numbers in the same order.
_TOLERANCE = 1e-5


def wrapper_class(config: Any, architectures: Sequence[str]) -> type | None:  # noqa: ANN401
    """Returns the class of `transformers` of a multimodal model with a text part.

    Returns None if there is none. `architectures`: as for `check_kind`.
    """
    from transformers.models.auto import modeling_auto

    mapping: Any = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING
    if type(config) not in mapping:
        return None
    found: type = mapping[type(config)]
    is_named = any(_plain(name) == _plain(found.__name__) for name in architectures)
    return found if is_named or not architectures else None


def causal_classes(config: Any) -> dict[str, type]:  # noqa: ANN401
    """Returns the causal language models of transformers for the type of `config`, by name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return {}
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return {each.__name__: each for each in (found if isinstance(found, tuple) else (found,))}


def is_causal(config: Any, architectures: Sequence[str]) -> bool:  # noqa: ANN401
    """Returns whether transformers has a causal language model of this type and such a name."""
    classes = causal_classes(config)
    return bool(classes) and (not architectures or any(name in classes for name in architectures))


@torch.inference_mode()
def text_part(wrapper: Any) -> Any:  # noqa: ANN401
    """Returns the part of `wrapper`, a multimodal model with its weights, that is served for text.

    The wrapper may be taken apart. Raises ModelUnsupported if the wrapper does not take text alone.
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
        # The model needs an image, for example.
        raise ModelUnsupported(
            f"{name}: its code in transformers rejects text alone with this config.json"
            f" ({one_line(error)}): not served; supported: a model that accepts text alone"
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
            f"{name}: its output changes without its {', '.join(left_out)}: not served; supported:"
            " a model whose text part is independent"
        )
    _log.info("text_part_served wrapper=%s without=%r", name, ", ".join(left_out))
    return wrapper


def _as_causal_models(wrapper: Any, text_config: Any) -> Iterable[Any]:  # noqa: ANN401
    """Yields the wrapper's language model as causal language models of its own type."""
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
    """Replaces parts that hold weights and were not `used` by identities. Returns their names."""
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
    """Returns whether `model` gives the `expected` logits [Q, L, V] of `tokens` [Q, L]."""
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
