"""The tokens of a prompt: drawn, the same for the same key, and new ones in each run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from splitserve_bench.workloads.conversation import Piece

_NUM_KEPT = 1024
_KEY_BITS = 64


class PromptTokens:
    """Makes token ids from `low` on, below `high`. Other `salt`, other tokens.

    So nothing that one run asks is in the prefix cache from a run before, while prompts of a run
    share what their pieces say. Pieces that come again are kept, the latest 1024.
    """

    def __init__(self, salt: int, low: int, high: int) -> None:
        self._salt = salt % 2**_KEY_BITS
        self._low = low
        self._high = high
        self._kept: OrderedDict[int, list[int]] = OrderedDict()

    def of(self, pieces: Iterable[Piece]) -> list[int]:
        """The tokens of all of them, one after another."""
        return [token_id for piece in pieces for token_id in self._tokens(piece)]

    def _tokens(self, piece: Piece) -> list[int]:
        known = self._kept.pop(piece.key, [])
        if len(known) < piece.num_tokens:
            known = self._draw(piece)
        self._kept[piece.key] = known
        if len(self._kept) > _NUM_KEPT:
            self._kept.popitem(last=False)
        return known if len(known) == piece.num_tokens else known[: piece.num_tokens]

    def _draw(self, piece: Piece) -> list[int]:
        key = self._salt << _KEY_BITS | piece.key % 2**_KEY_BITS
        # Of raw words each token has its own, so that a longer piece begins as a shorter one does.
        words = np.random.Philox(key=key).random_raw(piece.num_tokens)
        ids: list[int] = (self._low + words % np.uint64(self._high - self._low)).tolist()
        return ids
