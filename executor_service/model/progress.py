"""Progress of what may take long at the start."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

_DELAY_S = 1.0

_Item = TypeVar("_Item")


def show_progress(items: Sequence[_Item], what: str, delay_s: float = _DELAY_S) -> Iterable[_Item]:
    """Yields `items`; a bar on standard error counts them if it is a terminal.

    It appears after `delay_s`, and is gone at the end.
    """
    from tqdm import tqdm

    bar: Iterable[_Item] = tqdm(items, desc=what, disable=None, delay=delay_s, leave=False)
    return bar
