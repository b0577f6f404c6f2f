"""Check that weights and configuration describe the same model.

The rule: every tensor of the model is in the checkpoint, in its shape, or tied to one that is;
and every tensor of the checkpoint has its place in the model. Only tensors that cannot change a
logit may be left out: those that transformers itself lists for the class, tables and masks that
the model makes itself, layers that predict tokens further ahead, and scales of keys and values
(see `read_kv_scales`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from executor_service.checkpoint.kv_scales import is_kv_scale
from executor_service.errors import ModelUnreadable

# Tables and masks of earlier versions of models.
_TABLES = re.compile(
    r"(^|\.)(inv_freq|original_inv_freq|cos_cached|sin_cached|position_ids|masked_bias)$"
)
# Layer of encoders behind their hidden states.
_POOLER = "pooler"
_FURTHER_AHEAD = re.compile(r"(^|\.)mtp(_\w+)?\.")
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")


def check_weight_names(
    path: Path,
    model: Any,  # noqa: ANN401
    info: Mapping[str, Any],
    *,
    is_headless: bool = False,
) -> None:
    """Raises ModelUnreadable for a checkpoint that breaks the rule, with a name and the count.

    `path`: of the checkpoint. `model`: of `transformers`. `info`: its loading info. `is_headless`:
    only hidden states of the model are used, so heads may be missing, or left over.
    """
    model_class = type(model).__name__
    is_head = _heads_of(model) if is_headless else lambda _: False
    missing = sorted(name for name in info["missing_keys"] if not is_head(name))
    if missing:
        raise ModelUnreadable(
            f"{path}: the weights lack {missing[0]} and {len(missing) - 1} more tensors of"
            f" {model_class}: not served; supported: weights with all tensors"
        )
    mismatched = sorted(info["mismatched_keys"])
    if mismatched:
        name, found, expected = mismatched[0]
        raise ModelUnreadable(
            f"{path}: {name} has shape {list(found)} where the configuration implies"
            f" {list(expected)}, and {len(mismatched) - 1} more tensors do not match: not"
            " served; supported: weights with the config.json that they were saved with"
        )
    unused = sorted(
        name for name in info["unexpected_keys"] if not (_is_harmless(name, model) or is_head(name))
    )
    if unused:
        raise ModelUnreadable(
            f"{path}: {model_class} does not use {unused[0]} and {len(unused) - 1} more"
            " tensors of the weights, which may be of another model: not served; supported:"
            " weights with the config.json that they were saved with"
        )


def _heads_of(model: Any) -> Callable[[str], bool]:  # noqa: ANN401
    """Returns whether a name is that of a tensor behind the hidden states of `model`."""
    parts = {name for name, _ in model.named_children()} | {model.base_model_prefix}
    parts.discard(_POOLER)
    return lambda name: name.partition(".")[0] not in parts or f".{_POOLER}." in f".{name}"


def _is_harmless(name: str, model: Any) -> bool:  # noqa: ANN401
    if _TABLES.search(name) or _FURTHER_AHEAD.search(name) or is_kv_scale(name):
        return True
    # Checkpoints may omit the first part of names.
    if any(f".{buffer}".endswith(f".{name}") for buffer, _ in model.named_buffers()):
        return True
    layer = _LAYER.search(name)
    text_config = model.config.get_text_config(decoder=True)
    return layer is not None and int(layer[2]) in _layers_further_ahead(text_config)


def _layers_further_ahead(config: Any) -> Iterable[int]:  # noqa: ANN401
    """Returns the extra last layers that, by the configuration, predict further ahead."""
    num_layers = getattr(config, "num_hidden_layers", None)
    num_ahead = getattr(config, "num_nextn_predict_layers", None)
    if not isinstance(num_layers, int) or not isinstance(num_ahead, int):
        return ()
    return range(num_layers, num_layers + num_ahead)
