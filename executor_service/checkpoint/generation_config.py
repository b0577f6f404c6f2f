"""What a checkpoint's generation_config.json says: what ends a sequence, and how best to sample.

It is advice, so whatever is wrong with it costs a line in the log and the field that is wrong.
`transformers` never gets to see the file: it would refuse the whole model for some of this.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from executor_service.steps.executor_info import DefaultSampling
from splitserve_rpc.json_text import parse_json

_log = logging.getLogger(__name__)

_FILE_NAME = "generation_config.json"
# The largest known ones have a few kilobytes.
_MAX_FILE_BYTES = 2**20
_MAX_SHOWN_CHARS = 80
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """`eos_token_ids`: None if the file does not say."""

    eos_token_ids: tuple[int, ...] | None = None
    sampling: DefaultSampling = field(default_factory=DefaultSampling)


def read_generation_config(directory: Path, vocab_size: int) -> GenerationConfig:
    """What the file in `directory` says, as far as it makes sense; nothing if there is none."""
    path = directory / _FILE_NAME
    if not path.exists():
        return GenerationConfig()
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError(f"it has more than {_MAX_FILE_BYTES} bytes")
        content = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        _log.warning("generation_config_ignored path=%s error=%r", path, str(error))
        return GenerationConfig()
    return GenerationConfig(
        read_eos_token_ids(content.get("eos_token_id"), vocab_size), _read_sampling(content)
    )


def read_eos_token_ids(value: object, vocab_size: int) -> tuple[int, ...] | None:
    """A token id or a list of them; None if `value` is None, or nothing of it makes sense."""
    if value is None:
        return None
    found = value if isinstance(value, (list, tuple)) else [value]
    token_ids = [item for item in found if _is_int(item) and 0 <= item < vocab_size]
    if len(token_ids) < len(found):
        _warn("eos_token_id", value, f"token ids from 0 to {vocab_size - 1}")
    return tuple(dict.fromkeys(token_ids)) or None


def _read_sampling(content: dict[str, Any]) -> DefaultSampling:
    """A file that gives a temperature means it, even if it forgets to say `do_sample`.

    `transformers` is greedy then; but the fields are there because somebody chose them, and no one
    writes them for greedy decoding. Only `do_sample` false is understood as such.
    """
    values = {name: _field(content, name, *rule) for name, rule in _FIELDS.items()}
    if values["top_k"] in (0, -1):
        values["top_k"] = None
    if _field(content, "do_sample", _is_bool, "true or false") is False:
        values["temperature"] = 0.0
    return DefaultSampling(**values)


def _field(
    content: dict[str, Any], name: str, is_allowed: Callable[[Any], bool], allowed: str
) -> Any:  # noqa: ANN401
    """The value of a field; None, and a warning, if it is not allowed."""
    value = content.get(name)
    if value is None or is_allowed(value):
        return value
    _warn(name, value, allowed)
    return None


def _warn(name: str, value: object, allowed: str) -> None:
    shown = repr(value)
    if len(shown) > _MAX_SHOWN_CHARS:
        shown = shown[:_MAX_SHOWN_CHARS] + "..."
    _log.warning(
        "generation_config_field_ignored field=%s value=%s allowed=%r", name, shown, allowed
    )


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# Comparisons are false for NaN.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda x: _is_number(x) and 0 <= x <= 100, "[0, 100]"),
    "top_k": (lambda x: _is_int(x) and -1 <= x <= _INT32_MAX, "1 or more, or 0 or -1 for all"),
    "top_p": (lambda x: _is_number(x) and 0 < x <= 1, "(0, 1]"),
    "min_p": (lambda x: _is_number(x) and 0 <= x <= 1, "[0, 1]"),
    "repetition_penalty": (lambda x: _is_number(x) and 0 < x <= 100, "(0, 100]"),
}
