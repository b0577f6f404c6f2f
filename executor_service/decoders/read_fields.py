"""Which fields of its configuration the code of a model reads."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch


class ReadFields:
    """Notes which of some fields are read, while a model is built and while it runs."""

    def __init__(self, names: Iterable[str]) -> None:
        self._watched = frozenset(names)
        self._read: dict[str, None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Those that were read so far."""
        return tuple(self._read)

    def build(self, model: Any) -> None:  # noqa: ANN401
        """Builds another model as `model` was built, without numbers, and notes what it reads."""
        if not self._watched:
            return
        config = copy.deepcopy(model.config)
        self.watch(config)
        with torch.device("meta"):
            type(model)(config)

    def watch(self, config: Any) -> None:  # noqa: ANN401
        """Notes what is read from `config` from now on. Changes its class."""
        if not self._watched:
            return
        original, watched, read = type(config), self._watched, self._read

        class Watched(original):  # type: ignore[misc, valid-type]
            def __getattribute__(self, attribute: str) -> Any:  # noqa: ANN401
                if attribute in watched:
                    read[attribute] = None
                return super().__getattribute__(attribute)

        config.__class__ = Watched
