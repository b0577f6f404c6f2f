"""Parser for JSON of unknown origin, which may be nested arbitrarily deeply."""

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
    """Returns the result of `json.loads`. Raises ValueError, also for too deep nesting."""
    try:
        return json.loads(  # noqa: TID251  # all other modules call this function
            text, object_pairs_hook=object_pairs_hook, parse_constant=parse_constant
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
