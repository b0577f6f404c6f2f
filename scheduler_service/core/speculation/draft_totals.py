"""What came of drafts."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_service.core.plan import Drafts, StepOutcome


@dataclass(slots=True)
class DraftTotals:
    """Since the core began. `num_steps`: with drafts; `num_drafts`: verified; `num_accepted`."""

    num_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0

    def take(self, drafts: Drafts, outcome: StepOutcome) -> None:
        """An executed step had `drafts`. Tokens of rows that ran on behind them count for none."""
        self.num_steps += 1
        self.num_drafts += len(drafts.token_ids)
        num_taken, start = 0, 0
        for index, count in enumerate(drafts.counts.tolist()):
            if not count:
                continue
            guesses = drafts.token_ids[start : start + count].tolist()
            start += count
            tokens = outcome.tokens_of(index)
            is_same = [guess == token for guess, token in zip(guesses, tokens, strict=False)]
            num_taken += is_same.index(False) if False in is_same else len(is_same)
        self.num_accepted += num_taken
