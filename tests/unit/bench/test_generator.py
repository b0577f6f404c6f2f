"""Send times and latencies of the load generator, in virtual time."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from splitserve_bench.load import Generator, LoadAbandoned, Outcome, Pace
from splitserve_bench.targets import AskFailed
from splitserve_bench.workloads import Conversation, PromptPiece, Turn
from tests.support.bench.targets import Script, ScriptedTarget, at, run_virtually

# The first is due so much after the beginning, so that it can be made ready.
LEAD_S = 0.05


class Seen:
    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.given_up: list[LoadAbandoned] = []

    def gave_up(self, given_up: LoadAbandoned) -> None:
        self.given_up.append(given_up)

    def ended(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def worked(self, busy_ratio: float) -> None:
        pass

    @property
    def most_open(self) -> int:
        """At any time; whoever ends makes room for who comes in that moment."""
        changes = sorted(
            [(each.ended_s, -1) for each in self.outcomes]
            + [(each.sent_s, 1) for each in self.outcomes]
        )
        return max(itertools.accumulate(change for _, change in changes))


def load(target: ScriptedTarget, conversations: list[Conversation], pace: Pace) -> Seen:
    seen = Seen()
    generator = Generator(lambda: target.begin(0), pace, seen)
    run_virtually(generator.run(iter(conversations), begin_s=0.0))
    return seen


def always(*delays_s: float) -> ScriptedTarget:
    script = Script([(delay_s, 1) for delay_s in delays_s])
    return ScriptedTarget(lambda _number: script)


def test_open_loop_sends_on_time_when_answers_are_slow() -> None:
    target = always(100.0)

    seen = load(target, at(0, 0.5, 0.5, 3), Pace())

    assert target.sent_s == pytest.approx([LEAD_S, LEAD_S + 0.5, LEAD_S + 0.5, LEAD_S + 3])
    assert seen.most_open == 4


def test_latency_counts_from_the_due_time() -> None:
    target = always(1.0)

    seen = load(target, at(0, 0.1, 0.2), Pace(max_open=1))

    # Each waits for the one before: 0.9 s, then 0.8 s more. Nothing of that is hidden.
    waits = [outcome.sent_s - outcome.due_s for outcome in seen.outcomes]
    assert waits == pytest.approx([0, 0.9, 1.8], abs=1e-9)
    firsts = [outcome.arrivals_s[0] - outcome.due_s for outcome in seen.outcomes]
    assert firsts == pytest.approx([1.0, 1.9, 2.8])


def test_open_loop_gives_up_when_too_far_behind() -> None:
    target = always(1.0)

    # A load that no target can bear, and that would never be over.
    endless = (each for number in itertools.count() for each in at(number * 1e-9))
    seen = Seen()
    pace = Pace(max_open=2, max_behind_s=3.5)
    run_virtually(Generator(lambda: target.begin(0), pace, seen).run(endless, begin_s=0.0))

    assert len(seen.outcomes) == 8
    assert {outcome.failed for outcome in seen.outcomes} == {None}
    (given_up,) = seen.given_up
    assert given_up.behind_s == pytest.approx(3.5, abs=1e-3)
    assert given_up.after_s == pytest.approx(3.5, abs=1e-3)
    assert given_up.num_begun == 8


def test_open_loop_gives_up_while_nobody_ends_at_all() -> None:
    seen = load(always(1000.0), at(0, 1, 1, 1), Pace(max_open=2, timeout_s=60, max_behind_s=5))

    assert len(seen.outcomes) == 2
    (given_up,) = seen.given_up
    assert given_up.behind_s == pytest.approx(5)
    assert given_up.num_begun == 2


def test_open_loop_gives_nothing_up_when_it_catches_up() -> None:
    seen = load(always(1.0), at(0, 0, 0, 0), Pace(max_open=1, max_behind_s=3.5))

    assert len(seen.outcomes) == 4
    assert seen.given_up == []


def test_closed_loop_keeps_its_concurrency() -> None:
    target = always(1.0, 0.5)

    seen = load(target, at(*[0] * 7), Pace(concurrency=3))

    assert seen.most_open == 3
    assert target.sent_s == pytest.approx([0, 0, 0, 1.5, 1.5, 1.5, 3])
    assert {outcome.sent_s - outcome.due_s for outcome in seen.outcomes} == {0}


def test_closed_loop_begins_nothing_after_its_duration() -> None:
    target = always(1.0)

    load(target, at(*[0] * 100), Pace(concurrency=2, duration_s=2.5))

    assert target.sent_s == pytest.approx([0, 0, 1, 1, 2, 2])


def turns(*think_s: float) -> tuple[Turn, ...]:
    return tuple(Turn((PromptPiece(number, 5),), 2, wait) for number, wait in enumerate(think_s))


def test_later_turn_is_due_after_the_answer_and_the_thinking() -> None:
    target = always(1.0, 1.0)

    seen = load(target, [Conversation(0.0, turns(0, 4, 0))], Pace())

    assert target.sent_s == pytest.approx([LEAD_S, LEAD_S + 6, LEAD_S + 8])
    assert [outcome.sent_s - outcome.due_s for outcome in seen.outcomes] == pytest.approx([0] * 3)


def test_conversation_ends_when_a_turn_has_failed() -> None:
    failing = Script([(0.5, 1)], failure=AskFailed("broken", "it broke"))
    target = ScriptedTarget(lambda _number: failing)

    seen = load(target, [Conversation(0.0, turns(0, 0, 0))], Pace())

    (outcome,) = seen.outcomes
    assert (outcome.failed, outcome.message, len(outcome.arrivals_s)) == ("broken", "it broke", 1)


def test_request_fails_when_its_time_is_up() -> None:
    slow, quick = Script([(0.5, 1), (1000.0, 1)]), Script([(0.5, 1)])
    target = ScriptedTarget(lambda number: slow if number == 0 else quick)

    seen = load(target, at(0, 1), Pace(timeout_s=30.0))

    kinds = {outcome.failed: outcome.ended_s - outcome.sent_s for outcome in seen.outcomes}
    assert kinds == {"timeout": pytest.approx(30.0), None: pytest.approx(0.5)}


def test_answer_without_a_token_is_a_failure() -> None:
    target = ScriptedTarget(lambda _number: Script([], end_s=1.0))

    (outcome,) = load(target, at(0), Pace()).outcomes

    assert outcome.failed == "empty_answer"


def test_load_ends_when_the_workload_raises() -> None:
    target, seen = always(1000.0), Seen()

    def conversations() -> object:
        yield from at(0, 1)
        raise ValueError("the trace is cut off")

    async def main() -> None:
        generator = Generator(lambda: target.begin(0), Pace(), seen)
        with pytest.raises(ExceptionGroup) as caught:
            await generator.run(conversations(), 0.0)  # type: ignore[arg-type]
        assert [str(error) for error in caught.value.exceptions] == ["the trace is cut off"]
        assert asyncio.get_running_loop().time() < 10

    run_virtually(main())
