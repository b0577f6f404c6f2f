"""Which tokens a row may never sample, or not just now, prepared once for all its steps.

Shape letters: V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class TokenConstraints:
    """What `allowed_token_ids` and `bad_words_token_ids` of a row come to.

    `allowed`: None for all. `forbidden`: the bad words of one token. `phrases`: the others, by the
    token before the one that they forbid: what precedes the two, and the forbidden one.
    """

    allowed: npt.NDArray[np.int64] | None
    forbidden: npt.NDArray[np.int64]
    phrases: Mapping[int, Sequence[tuple[tuple[int, ...], int]]]

    @classmethod
    def of(
        cls, allowed_token_ids: Sequence[int], bad_words: Sequence[Sequence[int]]
    ) -> TokenConstraints | None:
        """None if there are none. A bad word that is empty is left to the checks of a batch."""
        if not allowed_token_ids and not bad_words:
            return None
        phrases: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for tokens in bad_words:
            if len(tokens) > 1:
                phrases.setdefault(tokens[-2], []).append((tuple(tokens[:-2]), tokens[-1]))
        single = [tokens[0] for tokens in bad_words if len(tokens) == 1]
        return cls(
            np.array(allowed_token_ids, np.int64) if allowed_token_ids else None,
            np.array(single, np.int64),
            phrases,
        )

    def blocked(self, vocab_size: int) -> npt.NDArray[np.bool_] | None:
        """[V]; what can never be sampled, None if that is nothing."""
        if self.allowed is None and not len(self.forbidden):
            return None
        blocked = np.full(vocab_size, self.allowed is not None)
        if self.allowed is not None:
            blocked[self.allowed] = False
        blocked[self.forbidden] = True
        return blocked

    def forbidden_after(self, history: Sequence[int], num_tokens: int) -> list[int]:
        """The last tokens of bad words that the first `num_tokens` of `history` end in, but for it.

        `history` is a list, or as fast as one: it is asked for a few elements, and not copied.
        """
        last = num_tokens - 1
        if last < 0:
            return []
        return [
            token_id
            for before, token_id in self.phrases.get(int(history[last]), ())
            if len(before) <= last and tuple(history[last - len(before) : last]) == before
        ]
