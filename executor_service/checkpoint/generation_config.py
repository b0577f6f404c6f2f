"""Reading of generation_config.json: tokens that end a sequence, and recommended sampling.

The file is advice: a wrong field, or a wrong file, is ignored with a warning in the log.
`transformers` never reads the file, because it would refuse the whole model for some errors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from executor_service.steps import DefaultSampling
from splitserve_common import parse_json
from splitserve_contract import RECOMMENDED_PARAMETERS

_log = logging.getLogger(__name__)

_FILE_NAME = "generation_config.json"
# The largest known files have a few kilobytes.
_MAX_FILE_BYTES = 2**20
_MAX_SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Contents of generation_config.json. `eos_token_ids`: None if the file has none.

    `decoder_start`, `forced_bos`: tokens with which the decoder of an encoder-decoder model begins;
    None for none.
    """

    eos_token_ids: tuple[int, ...] | None = None
    decoder_start: int | None = None
    forced_bos: int | None = None
    sampling: DefaultSampling = field(default_factory=DefaultSampling)


def read_generation_config(directory: Path, vocab_size: int) -> GenerationConfig:
    """Returns the valid fields of the file in `directory`; defaults if there is no usable file."""
    path = directory / _FILE_NAME
    if not path.exists():
        return GenerationConfig()
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError(f"more than {_MAX_FILE_BYTES} bytes")
        content = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        _log.warning("generation_config_ignored path=%s error=%r", path, str(error))
        return GenerationConfig()

    def is_token(value: object) -> bool:
        return _is_int(value) and 0 <= value < vocab_size

    decoder_start, forced_bos = (
        _field(content, name, is_token, f"a token id from 0 to {vocab_size - 1}")
        for name in ("decoder_start_token_id", "forced_bos_token_id")
    )
    return GenerationConfig(
        read_eos_token_ids(content.get("eos_token_id"), vocab_size),
        decoder_start,
        forced_bos,
        _read_sampling(content),
    )


def read_eos_token_ids(value: object, vocab_size: int) -> tuple[int, ...] | None:
    """Returns the valid ids of a token id or list of them; None if there are none."""
    if value is None:
        return None
    found = value if isinstance(value, (list, tuple)) else [value]
    token_ids = [item for item in found if _is_int(item) and 0 <= item < vocab_size]
    if len(token_ids) < len(found):
        _warn("eos_token_id", value, f"token ids from 0 to {vocab_size - 1}")
    return tuple(dict.fromkeys(token_ids)) or None


def _read_sampling(content: dict[str, Any]) -> DefaultSampling:
    """Returns the recommended sampling. A temperature counts even if `do_sample` is missing.

    `transformers` is greedy in that case. But authors set these fields on purpose, and not for
    greedy decoding, so only `do_sample` false means greedy.
    """
    values = {}
    for parameter in RECOMMENDED_PARAMETERS:
        allowed = parameter.describe_allowed()
        value = _field(content, parameter.name, parameter.accepts, allowed)
        values[parameter.name] = None if value in parameter.off else value
    if _field(content, "do_sample", _is_bool, "true or false") is False:
        values["temperature"] = 0.0
    return DefaultSampling(**values)


def _field(
    content: dict[str, Any], name: str, is_allowed: Callable[[Any], bool], allowed: str
) -> Any:  # noqa: ANN401
    """Returns the value of a field; None, after a warning, if it is not allowed."""
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
