"""Texts of `splitserve explain`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_service.scheduler import AcquittalReason, MoveReason
from scheduler_service.scheduler.routing import routing
from scheduler_service.scheduler.values import AdmissionBlocker, AssignedFor
from splitserve_cli.explain import (
    because,
    describe_explanation,
    describe_queue,
    details_of,
    seconds,
    summary,
)
from splitserve_client import (
    Explanation,
    LifeEvent,
    LifePart,
    Obstacle,
    QueueExplanation,
    RequestLife,
    WaitingRequest,
)


def event(
    at_s: float, kind: str, executor: str = "", reason: str = "", **numbers: int
) -> LifeEvent:
    return LifeEvent(at_s, kind, executor, reason, numbers)


LIFE = RequestLife(
    "r1",
    "team",
    0.0,
    5.6,
    False,
    (
        event(0, "received", num_waiting=3, num_prompt_tokens=40),
        event(3.2, "began", "e0", num_tokens=40, num_cached=32),
        event(3.6, "first_token", "e0", num_chunks=2, num_prompt_tokens=8),
        event(4, "preempted", "e0", "urgency"),
        event(5.6, "ended", "e0", "length", num_output_tokens=1),
    ),
    0,
    (
        LifePart("queued", "blocks", "e0", 2.9),
        LifePart("tokens", "", "e0", 1.0),
        LifePart("preempted", "urgency", "e0", 1.0),
        LifePart("prompt", "", "e0", 0.4),
        LifePart("queued", "behind_others", "", 0.3),
    ),
    None,
    (),
    0,
    0,
)


def test_summary_begins_with_the_longest_wait() -> None:
    assert summary(LIFE) == (
        "It waited 3.2 s until it began, 2.9 s of it because e0 had too few free KV blocks;"
        " prefill took 400 ms; decoding took 1.0 s; it was preempted;"
        " in total this interrupted it for 1.0 s; it ended: length (max_tokens reached)."
    )


def test_summary_says_what_it_is_doing_when_it_goes_on() -> None:
    waiting = replace(
        LIFE,
        is_unfinished=True,
        events=LIFE.events[:1],
        parts=LIFE.parts[:1],
        current=LifePart("queued", "rows", "", 0.5),
    )
    assert summary(waiting) == (
        "It waited 2.9 s, because e0 had too few free KV blocks; for the last 500 ms,"
        " it waits because every executor had no free row."
    )


def test_life_is_described_in_words() -> None:
    text = describe_explanation("r1", Explanation((LIFE,), (), 0, 1, 10))
    assert "request r1, tenant team, 1970-01-01 00:00:00 UTC" in text
    assert (
        "+3.200 s began                e0; 40 tokens known; 32 of them in the prefix cache" in text
    )
    assert "1 output token\n" in text
    strange = event(1, "danced", "e0", "moonlight", num_steps=2)
    assert details_of(strange) == "moonlight; e0; num_steps 2"
    assert because("moonlight", "e0") == "moonlight"


def test_life_escapes_terminal_controls_in_names() -> None:
    life = replace(LIFE, request_id="\x1b[2J", tenant="\x1b[31m")
    shown = describe_explanation("x", Explanation((life,), (), 0, 1, 10))
    shown += describe_explanation("\x1b[2J", Explanation((), ("\x1b[1m",), 1, 0, 10))
    first = WaitingRequest("\x1b[2J", "\x1b[2J", (Obstacle("\x1b[2J", "\x1b[2J"),))
    shown += describe_queue(QueueExplanation((first,), 1, 1))
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("explanation", "text"),
    [
        (Explanation((), ("r12",), 4, 3, 10), "similar ids: r12"),
        (Explanation((), (), 4, 3, 10), "knows 4 unfinished and 3 ended requests"),
        (Explanation((), (), 4, 3, 10), "if the id is right, the request was sent before this"),
        (Explanation((), (), 4, 10, 10), "the request ended and was dropped from the history, or"),
        (Explanation((), (), 0, 0, 0), "keeps no history"),
    ],
)
def test_unknown_request_is_told_what_is_known_instead(explanation: Explanation, text: str) -> None:
    shown = describe_explanation("r1", explanation)
    assert shown.startswith("unknown request: r1\n")
    assert text in shown


def test_queue_names_what_keeps_the_first_from_each_executor() -> None:
    first = WaitingRequest("r1", "", (Obstacle("e0", "rows"), Obstacle("e1", "does_not_fit")))
    assert describe_queue(QueueExplanation((first,), 7, 2)).splitlines() == [
        "7 requests waiting for an executor; first in the queue:",
        "r1",
        "  e0: e0 had no free row",
        "  e1: no registered executor could ever run it",
    ]
    nobody = QueueExplanation((replace(first, obstacles=()),), 1, 0)
    assert "  no executor accepted requests\n" in describe_queue(nobody)
    assert describe_queue(QueueExplanation((), 0, 2)) == "no request waits for an executor\n"


def test_times_have_few_digits() -> None:
    assert [seconds(s) for s in (0.00002, 0.0123, 1, 61.04, 7200)] == [
        "0.02 ms",
        "12.3 ms",
        "1.0 s",
        "61.0 s",
        "120 min",
    ]


def test_given_explains_the_choice_of_executor() -> None:
    given = event(
        1,
        "assigned",
        "e1",
        "most_cached",
        num_cached=32,
        num_ahead=12,
        num_running=1,
        cost_us=2000,
        cost_elsewhere_us=5500,
    )
    assert details_of(given) == (
        "e1 has more of it cached than others; 32 tokens of it cached there;"
        " 12 prompt tokens ahead of it there; 1 sequence running there;"
        " estimated time to first token: 2 ms, elsewhere 5.5 ms with 0 cached"
    )
    assert details_of(event(1, "assigned", "e1")) == "e1"
    assert details_of(event(1, "assigned", "e1", "{moonlight}")) == "{moonlight}; e1"
    assert because("{moonlight}", "e0") == "{moonlight}"


def test_every_reason_of_the_scheduler_has_its_words() -> None:
    for why in AssignedFor:
        assert why.value not in details_of(event(0, "assigned", "e0", why.value))
    for reason in (*AdmissionBlocker, *routing.RoutingBlocker, *MoveReason, *AcquittalReason):
        assert because(reason.value, "e0") != reason.value


def test_several_tokens_a_step_are_summed_up() -> None:
    end = event(9, "ended", "e0", "stop", num_output_tokens=30)
    life = replace(
        LIFE,
        events=(*LIFE.events[:1], end),
        num_draft_tokens=25,
        num_more_tokens=20,
        num_accepted_draft_tokens=14,
    )
    text = describe_explanation("r1", Explanation((life,), (), 0, 1, 10))
    assert text.endswith(
        "multiple tokens per step: 25 draft tokens, 14 accepted; 6 by run-ahead;"
        " 3.00 tokens per step with output\n"
    )


def test_summary_says_that_executors_may_have_died_of_it() -> None:
    quarantined = event(2, "quarantined", "e0", num_trials=3)
    end = event(9, "ended", "", "EXECUTOR_LOST_REPEATEDLY")
    life = replace(LIFE, events=(*LIFE.events[:2], quarantined, end))
    assert "it ran alone, as it may have crashed executors" in summary(life)
    assert "EXECUTOR_LOST_REPEATEDLY (executors were lost" in summary(life)
    assert details_of(quarantined) == "e0; until it has 3 tokens alone"
    acquitted = event(3, "acquitted", "e0", "came_through")
    assert "; it was acquitted; " in summary(
        replace(life, events=(*life.events[:3], acquitted, end))
    )
    assert details_of(acquitted) == "it ran alone for as many tokens as required; e0"


def test_refusal_and_error_have_their_message() -> None:
    refused = LifeEvent(0, "refused", "", "QUEUE_FULL", {}, "9 requests wait; allowed: \x1b9")
    life = replace(LIFE, events=(refused,), parts=())
    assert summary(life).startswith(
        "It was refused: QUEUE_FULL (9 requests wait; allowed: \\x1b9), see docs"
    )
    assert details_of(refused) == "QUEUE_FULL; 9 requests wait; allowed: \\x1b9"
    end = LifeEvent(1, "ended", "e0", "ROW_FAILED", {}, "NaN")
    assert summary(replace(LIFE, events=(end,))).endswith("it ended: ROW_FAILED (NaN).")


def test_journal_says_what_it_does_not_know() -> None:
    life = replace(LIFE, parts=(LifePart("queued", "not_recorded", "", 3.2),))
    text = describe_explanation("r1", Explanation((life,), (), 0, 1, 10), is_of_journal=True)
    assert "It waited 3.2 s until it began, because of a reason that the journal does not" in text
    assert text.endswith("(FILE.1 holds the part before FILE)\n")
