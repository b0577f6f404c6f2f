"""What a draft model has computed of a row, and which tokens it has yet to compute.

The draft's keys and values lie in the blocks of the row, beside those of the model. What is there
before a row is first seen (a shared prefix, say) is taken as computed: whoever filled these
blocks had a draft as well. If not, guesses are worse, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class DraftedRow:
    """`num_computed`: tokens that the draft has computed, and that were the row's.

    `owed`: the row's tokens from there on. `guessed`: what the draft took for them when it last
    guessed, and computed; nothing is owed then.
    """

    num_computed: int
    owed: list[int] = field(default_factory=list)
    guessed: list[int] = field(default_factory=list)

    def go_to(self, position: int) -> None:
        """The row's next input token is at `position`."""
        known = self.num_computed + len(self.owed)
        if self.num_computed <= position <= known:
            del self.owed[position - self.num_computed :]
        else:
            # Ahead, somebody else has computed what lies between; behind, it is computed anew.
            self.num_computed, self.owed, self.guessed = position, [], []

    def forget_before(self, position: int) -> None:
        """What is owed of before `position` will not be computed any more."""
        num_forgotten = min(max(position - self.num_computed, 0), len(self.owed))
        del self.owed[:num_forgotten]
        self.num_computed += num_forgotten

    def follow(self, position: int, token_ids: Sequence[int]) -> None:
        """The tokens of the row from `position` on, which it may have had before, are these."""
        self.go_to(position)
        num_right = 0
        for guess, token_id in zip(self.guessed, token_ids, strict=False):
            if guess != token_id:
                break
            num_right += 1
        self.num_computed += num_right
        self.guessed = []
        self.owed += token_ids[num_right:]

    def settle(self, guessed: Sequence[int] = ()) -> None:
        """What was owed is computed, and after it, perhaps, what was `guessed`."""
        self.num_computed += len(self.owed)
        self.owed, self.guessed = [], [*guessed]
