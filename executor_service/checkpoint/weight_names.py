"""Whether the weights of a checkpoint are those of the model that its configuration describes.

The rule: every tensor of the model is in the checkpoint, in its shape, or tied to one that is; and
every tensor of the checkpoint has its place in the model. Left out may only be what cannot change a
logit: what transformers itself lists for the class, tables and masks that the model makes itself,
layers that predict tokens further ahead, and scales of keys and values (see `kv_scales`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from executor_service.checkpoint.kv_scales import is_kv_scale
from executor_service.errors import ModelUnreadable

# Tables and masks that models had once, or had in another place.
_TABLES = re.compile(
    r"(^|\.)(inv_freq|original_inv_freq|cos_cached|sin_cached|position_ids|masked_bias)$"
)
_FURTHER_AHEAD = re.compile(r"(^|\.)mtp(_\w+)?\.")
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")


def check_weight_names(directory: Path, model: Any, info: Mapping[str, Any]) -> None:  # noqa: ANN401
    """Raises ModelUnreadable for a checkpoint that breaks the rule, with a name and the count.

    `model`: of `transformers`. `info`: what its loading says.
    """
    model_class = type(model).__name__
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelUnreadable(
            f"{directory}: the weights lack {missing[0]} and {len(missing) - 1} more tensors of"
            f" {model_class}, which would be random: not served; served would be all of them"
        )
    mismatched = sorted(info["mismatched_keys"])
    if mismatched:
        name, found, expected = mismatched[0]
        raise ModelUnreadable(
            f"{directory}: {name} has shape {list(found)} where config.json implies"
            f" {list(expected)}, and {len(mismatched) - 1} more tensors do not fit: not served;"
            " served would be weights with the config.json that they were saved with"
        )
    unused = sorted(name for name in info["unexpected_keys"] if not _is_harmless(name, model))
    if unused:
        raise ModelUnreadable(
            f"{directory}: {model_class} has no place for {unused[0]} and {len(unused) - 1} more"
            " tensors of the weights, so it may be another model: not served; served would be"
            " weights with the config.json that they were saved with"
        )


def _is_harmless(name: str, model: Any) -> bool:  # noqa: ANN401
    if _TABLES.search(name) or _FURTHER_AHEAD.search(name) or is_kv_scale(name):
        return True
    # Checkpoints may leave out the first part of names.
    if any(f".{buffer}".endswith(f".{name}") for buffer, _ in model.named_buffers()):
        return True
    layer = _LAYER.search(name)
    text_config = model.config.get_text_config(decoder=True)
    return layer is not None and int(layer[2]) in _layers_further_ahead(text_config)


def _layers_further_ahead(config: Any) -> Iterable[int]:  # noqa: ANN401
    """The layers behind the last one, as far as the configuration says what they are for."""
    num_layers = getattr(config, "num_hidden_layers", None)
    num_ahead = getattr(config, "num_nextn_predict_layers", None)
    if not isinstance(num_layers, int) or not isinstance(num_ahead, int):
        return ()
    return range(num_layers, num_layers + num_ahead)
