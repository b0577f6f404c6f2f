"""JSON of others, who may nest it as deep as they like."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def parse_json(
    text: str | bytes,
    *,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
    parse_constant: Callable[[str], Any] | None = None,
) -> Any:  # noqa: ANN401
    """What `json.loads` returns. Raises ValueError, and RecursionError never."""
    try:
        return json.loads(  # noqa: TID251  # it is what all others call
            text, object_pairs_hook=object_pairs_hook, parse_constant=parse_constant
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
