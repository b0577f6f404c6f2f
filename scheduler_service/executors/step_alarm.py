"""The clock beside an `AnswerWatch`: looks when it is time, and sees to what follows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from scheduler_service.core.plan import StepPlan
from scheduler_service.executors.answer_watch import AnswerWatch, Verdict
from scheduler_service.executors.step_patience import StepSize


class StepAlarm:
    """Of one executor.

    `ask_others`: to find out which other executors are there. `doubted`: told whenever it becomes
    doubtful, or is no longer. `give_up`: is set by whoever runs the executor, and is told why.
    """

    def __init__(
        self,
        watch: AnswerWatch,
        now_ns: Callable[[], int],
        *,
        block_size: int,
        ask_others: Callable[[], None],
        doubted: Callable[[bool], None],
    ) -> None:
        self._watch = watch
        self._now_ns = now_ns
        self._block_size = block_size
        self._ask_others = ask_others
        self._doubted = doubted
        self._timer: asyncio.TimerHandle | None = None
        self._looks_at_ns = 0
        self.give_up: Callable[[str], None] = lambda _why: None

    @property
    def watch(self) -> AnswerWatch:
        """What is known of its steps."""
        return self._watch

    def sent(self, plan: StepPlan) -> None:
        """A step is on its way."""
        self._watch.sent(StepSize.of(plan, self._block_size), self._now_ns())
        self._set_timer()

    def answered(self) -> None:
        """The oldest step was answered."""
        was_doubtful = self._watch.is_doubtful
        self._watch.answered(self._now_ns())
        self._set_timer()
        self._notice(was_doubtful=was_doubtful)

    def connected(self, *, is_cut: bool) -> None:
        """Its connection is broken, or is there again."""
        was_doubtful = self._watch.is_doubtful
        if is_cut:
            self._watch.cut()
        else:
            self._watch.mended(self._now_ns())
            self._set_timer()
        self._notice(was_doubtful=was_doubtful)

    def silent(self, *, is_silent: bool) -> None:
        """Whether it answers when it is asked whether it is there."""
        was_doubtful = self._watch.is_doubtful
        self._watch.is_silent = is_silent
        self._notice(was_doubtful=was_doubtful)

    def stop(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _notice(self, *, was_doubtful: bool) -> None:
        """Tells of a change of whether the executor is doubtful."""
        if was_doubtful != self._watch.is_doubtful:
            self._doubted(not was_doubtful)

    def _set_timer(self) -> None:
        """One timer serves many steps: it is set again only if it would be too late."""
        if self._timer is not None and self._looks_at_ns <= self._watch.earliest_look_ns:
            return
        at_ns = self._watch.look_at_ns
        if at_ns is None or (self._timer is not None and self._looks_at_ns <= at_ns):
            return
        self.stop()
        self._looks_at_ns = at_ns
        delay_s = max(0, at_ns - self._now_ns()) / 1e9
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        self._timer = None
        now_ns = self._now_ns()
        was_doubtful = self._watch.is_doubtful
        verdict = self._watch.look(now_ns)
        self._notice(was_doubtful=was_doubtful)
        match verdict:
            case Verdict.GIVE_UP:
                waited_s, allowed_s = self._watch.waited_s(now_ns), self._watch.allowed_s
                self.give_up(
                    f"its oldest step is not answered after {waited_s:.3g} s; "
                    f"steps like it may take {allowed_s:.3g} s"
                )
                return
            case Verdict.ASK:
                self._ask_others()
            case Verdict.WAIT:
                pass
        self._set_timer()
