"""The forms of steps that are recorded, and which of them a step goes into.

Shape letters: T tokens, D rows of decodes, P rows of prompts, L lines of logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from executor_service.model.input_batch import PassRows

# Of steps with prompts; beyond it the device has more to do than the host. With an 8B model on an
# H100 the host took 19 ms to launch 532 tokens, and a recording of 501 took 14.
MAX_PROMPT_SIZE = 1024
_PROMPT_SIZES = (16, *range(32, 257, 32), *range(320, MAX_PROMPT_SIZE + 1, 64))
# More prompts than that in so few tokens are rare; each costs a recording empty programs.
MOST_PROMPTS = 32


Kind = Literal["decode", "prompt"]


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a recording has room for.

    `num_tokens`: T. `num_decodes`: D rows of one token. `num_prompts`: P rows of any number of
    tokens, behind these, and one more behind them has the tokens that are added; 0 in a recording
    of decodes, whose added rows have a token each. `num_lines`: L.
    """

    num_tokens: int
    num_decodes: int
    num_prompts: int
    num_lines: int

    @property
    def num_rows(self) -> int:
        """Of decodes, prompts, and added tokens."""
        return self.num_decodes + self.num_prompts + (0 if self.is_decode else 1)

    @property
    def is_decode(self) -> bool:
        """Whether there is room for decodes alone."""
        return self.num_prompts == 0

    @property
    def kind(self) -> Kind:
        """Of the steps that it is for: of decodes alone, or not."""
        return "decode" if self.is_decode else "prompt"

    def has_room(self, rows: PassRows) -> bool:
        """For the rows of a pass of this kind, decodes or not."""
        num_decodes = rows.layout.num_decodes
        return (
            len(rows.token_ids) <= self.num_tokens
            and num_decodes <= self.num_decodes
            and rows.num_rows - num_decodes <= self.num_prompts
            and len(rows.logits_index) <= self.num_lines
        )


def decode_shapes(max_num_rows: int) -> list[StepShape]:
    """Rising: close together where a step is short; the last is as large as a step can be.

    1, 2, 4, multiples of 8 up to 256, then of 64 rows.
    """
    sizes = [1, 2, 4, *range(8, 257, 8), *range(320, max_num_rows, 64)]
    sizes = [size for size in sizes if size < max_num_rows] + [max_num_rows]
    return [StepShape(size, size, 0, size) for size in sizes]


def prompt_shapes(max_num_rows: int, max_num_tokens: int) -> list[StepShape]:
    """Returns sizes of recorded steps with prompts, rising, 21 at most; none below 2 tokens."""
    if max_num_tokens < 2:
        return []
    last = min(MAX_PROMPT_SIZE, max_num_tokens)
    sizes = [*(size for size in _PROMPT_SIZES if size < last), last]
    return [
        StepShape(
            num_tokens=size,
            num_decodes=min(size, max_num_rows),
            num_prompts=min(size // 2, max_num_rows, MOST_PROMPTS),
            num_lines=min(size, max_num_rows),
        )
        for size in sizes
    ]


def smallest(shapes: Iterable[StepShape], rows: PassRows) -> StepShape | None:
    """The first of `shapes`, which rise, that the rows of a pass fit into; None if none is."""
    is_decode = rows.is_decode
    fitting = (s for s in shapes if s.is_decode == is_decode and s.has_room(rows))
    return next(fitting, None)
