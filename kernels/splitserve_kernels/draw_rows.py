"""How the token of each row is chosen, as columns.

Shape letters: S rows that sample, V tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class DrawRows:
    """See `SamplingParams` in `executor.proto`; all [S], contiguous.

    `temperatures`: float32, 0 for the largest logit. `top_k`: int32, V or more for no limit.
    `top_p`: float64, 1 for no limit. `min_p`: float32, 0 for no limit. `seeds`, `positions`: int64,
    what the random number is a function of.
    """

    temperatures: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float32]
    seeds: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]

    def __len__(self) -> int:
        """S."""
        return len(self.seeds)

    @property
    def is_random(self) -> bool:
        """Whether any row is drawn."""
        return bool((self.temperatures > 0).any())

    def is_searched(self, vocab_size: int) -> bool:
        """Whether the limit of any row that is drawn depends on all its tokens."""
        is_limited = (self.top_k < vocab_size) | (self.top_p < 1)
        return bool((is_limited & (self.temperatures > 0)).any())
