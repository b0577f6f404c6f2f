"""What a draft is told to compute is what the row has, whatever was guessed before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from executor_service.speculation.draft_model import DraftedRow

_TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=5)


class _Slots:
    """The draft's keys and values: what was written where. It computes what a row says."""

    def __init__(self) -> None:
        self.row = DraftedRow(0)
        self.written: dict[int, int] = {}

    def compute(self, guessed: list[int]) -> None:
        start = self.row.num_computed
        for index, token in enumerate([*self.row.owed, *guessed]):
            self.written[start + index] = token
        self.row.settle(guessed)

    def assert_computed_is(self, tokens: list[int]) -> None:
        computed = self.row.num_computed
        assert [self.written[i] for i in range(computed)] == tokens[:computed]
        assert self.row.owed == tokens[computed : computed + len(self.row.owed)]


@given(st.lists(st.tuples(_TOKENS, _TOKENS, st.booleans(), st.integers(0, 2))))
def test_row_is_computed_as_far_as_its_tokens_are_when_guesses_are_wrong(
    moves: list[tuple[list[int], list[int], bool, int]],
) -> None:
    slots, tokens = _Slots(), list[int]()
    for new, guessed, is_asked, num_repeated in moves:
        # Some steps compute tokens again that were computed before.
        position = len(tokens) - min(num_repeated, len(tokens))
        slots.row.go_to(position)
        if is_asked:
            slots.compute(guessed)
        tokens = tokens[:position] + new
        slots.row.follow(position, new)
        slots.assert_computed_is(tokens)
    assert slots.row.num_computed + len(slots.row.owed) == len(tokens)


def test_row_owes_only_what_follows_its_right_guesses() -> None:
    row = DraftedRow(4)
    row.follow(4, [1, 2])
    row.settle([3, 4, 5])
    row.follow(6, [3, 4, 9])
    assert (row.num_computed, row.owed) == (8, [9])


def test_row_begins_where_it_goes_on_when_somebody_else_has_computed_what_is_before() -> None:
    row = DraftedRow(0)
    row.follow(0, [1, 2])
    row.follow(16, [7])
    assert (row.num_computed, row.owed) == (16, [7])
