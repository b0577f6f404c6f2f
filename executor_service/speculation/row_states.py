"""What is remembered of rows from step to step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from executor_service.steps.step import StepInput

_State = TypeVar("_State")


class RowStates(Generic[_State]):
    """One state for each row id; a row that takes the place of another begins anew."""

    def __init__(self, make: Callable[[int], _State]) -> None:
        """`make`: that of a row which is first seen at a position."""
        self._make = make
        # With that by which a row is told from another: its seed, and the length of its prompt.
        self._states: dict[int, tuple[tuple[int, int], _State]] = {}

    def of(self, step: StepInput, index: int) -> _State:
        """That of a row of `step`, by its index."""
        identity = (int(step.seeds[index]), int(step.num_prompt_tokens[index]))
        row_id = int(step.row_ids[index])
        known = self._states.get(row_id)
        if known is None or known[0] != identity:
            known = (identity, self._make(int(step.num_computed_tokens[index])))
            self._states[row_id] = known
        return known[1]

    def forget(self) -> None:
        """All rows."""
        self._states.clear()
