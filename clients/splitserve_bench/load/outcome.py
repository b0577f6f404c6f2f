"""What became of one request, and when."""

from __future__ import annotations

from dataclasses import dataclass, field

from splitserve_bench.targets.target import Answered


@dataclass(slots=True)
class Outcome:
    """Times are those of the event loop, in seconds. `due_s`: when it was to be sent.

    `arrivals_s`: when tokens came, with `num_tokens` each (None: that is not said). `failed`: the
    kind of error, None for an answer that is complete. `held_s`: how long after `due_s` it waited
    since too many others were open. `is_interrupted`: the run was over before the answer was.
    """

    due_s: float
    num_wanted_tokens: int
    sent_s: float = 0.0
    ended_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    num_tokens: list[int | None] = field(default_factory=list)
    answered: Answered = field(default_factory=Answered)
    failed: str | None = None
    message: str = ""
    held_s: float = 0.0
    is_interrupted: bool = False

    @property
    def num_output_tokens(self) -> int:
        """As the server says; as they were counted; or one for each arrival."""
        if self.answered.num_output_tokens is not None:
            return self.answered.num_output_tokens
        return sum(1 if number is None else number for number in self.num_tokens)

    @property
    def tokens_of_arrivals(self) -> list[float]:
        """How many each arrival brought; where that is not said, as many as the others of those."""
        known = [number for number in self.num_tokens if number is not None]
        num_unsaid = len(self.num_tokens) - len(known)
        each = max(self.num_output_tokens - sum(known), 0) / num_unsaid if num_unsaid else 0.0
        return [each if number is None else number for number in self.num_tokens]
