"""Who is isolated, where, and who is failed for executors that were lost."""

from __future__ import annotations

from collections.abc import Collection

from scheduler_service.scheduler import (
    FORGIVING_TOKENS,
    MAX_REPEATS,
    NUM_ALONE_IN_A_STORM,
    QUARANTINE_REASON,
    RETURN_NS,
    STORM_NS,
    Loss,
    LossCause,
    Quarantine,
    QuarantineDecision,
)
from scheduler_service.scheduler.values import Request, SamplingParams, SequenceStatus
from tests.support.core.driver import CoreDriver


def make(name: str, num_output_tokens: int = 0, max_tokens: int = 190) -> Request:
    """A request that came from a lost executor."""
    request = Request.create(
        name,
        [1, 2, 3],
        SamplingParams(max_tokens=max_tokens),
        arrival=100 + int(name[1:]),
        seed=0,
        resume_token_ids=[[7] * num_output_tokens],
    )
    request.was_in_flight = True
    return request


def grown(request: Request, num_output_tokens: int) -> Request:
    """The same with so many output tokens, as its next executor gives it back."""
    other = make(request.request_id, num_output_tokens)
    other.trial_size, other.num_trials_left = request.trial_size, request.num_trials_left
    return other


def lose(
    quarantine: Quarantine,
    *requests: Request,
    cause: LossCause = LossCause.DIED,
    now_ns: int = 0,
    life: int = 0,
    has_answered: bool = True,
    in_flight: Collection[str] = (),
    num_steps: int = 1,
) -> tuple[list[str], list[str]]:
    """Names of those that are isolated, and of those that have failed."""
    loss = Loss(cause, life, now_ns, has_answered, in_flight=in_flight, num_steps=num_steps)
    verdict: QuarantineDecision = quarantine.executor_lost(requests, loss)
    return [r.request_id for r in verdict.isolated], [r.request_id for r in verdict.failed]


def test_executor_lost_isolates_and_then_fails_when_it_is_alone() -> None:
    quarantine, poison, other = Quarantine(2), make("r1"), make("r2")
    assert lose(quarantine, poison, other) == ([], [])
    assert lose(quarantine, poison) == (["r1"], [])
    assert (poison.trial_size, poison.num_trials_left) == (1, 1)

    assert lose(quarantine, poison) == ([], ["r1"])

    assert poison.error is not None
    assert poison.error[0] == QUARANTINE_REASON
    assert all(s.status is SequenceStatus.FINISHED for s in poison.sequences)
    assert not quarantine.holds(poison)


def test_executor_lost_accuses_nobody_without_a_step_in_flight() -> None:
    quarantine, request = Quarantine(1), make("r1")
    assert lose(quarantine, request, cause=LossCause.BLAMELESS) == ([], [])
    request.was_in_flight = False
    assert lose(quarantine, request) == ([], [])
    request.was_in_flight = True
    assert lose(quarantine, request) == (["r1"], [])


def test_executor_lost_accuses_recalled_requests_in_flight() -> None:
    quarantine, poison, other = Quarantine(2), make("r1"), make("r2")
    for _ in range(2):
        lose(quarantine, poison, make("r3"))
    quarantine.recalled(poison)

    # It is the recalled one that the other was not alone with.
    assert lose(quarantine, other, in_flight=["r1"]) == (["r2"], [])
    assert lose(quarantine, in_flight=["r1"]) == ([], ["r1"])


def test_trials_allow_for_lost_results_in_flight() -> None:
    quarantine, request = Quarantine(2), make("r1")
    lose(quarantine, request, num_steps=2)
    request = grown(request, 4)
    lose(quarantine, request, num_steps=2)

    assert request.num_trials_left == 6


def test_losses_are_forgiven_when_there_were_enough_tokens_in_between() -> None:
    for num_tokens, is_isolated in [(FORGIVING_TOKENS - 1, True), (FORGIVING_TOKENS, False)]:
        quarantine, request = Quarantine(2), make("r1")
        lose(quarantine, request)
        request = grown(request, num_tokens)
        assert lose(quarantine, request)[0] == ["r1"] * is_isolated
        # As many as came in between, and one.
        assert request.num_trials_left == FORGIVING_TOKENS * is_isolated
    # Next time it takes twice as many.
    request = grown(request, FORGIVING_TOKENS + 2 * FORGIVING_TOKENS - 1)
    assert lose(quarantine, request)[0] == ["r1"]


def test_one_loss_alone_fails_nobody_when_it_may_be_chance() -> None:
    quarantine, request = Quarantine(2), make("r1")
    lose(quarantine, make("r2"))  # executors die of other things, too
    for _ in range(2):
        lose(quarantine, request, make("r3"))
    for _ in range(NUM_ALONE_IN_A_STORM - 1):
        assert lose(quarantine, request) == ([], [])
    assert lose(quarantine, request) == ([], ["r1"])


def test_one_loss_alone_is_proof_without_other_recent_losses() -> None:
    quarantine = Quarantine(2)
    lose(quarantine, make("r9"))
    for name, now_ns in (("r1", STORM_NS), ("r2", 2 * STORM_NS)):
        request = make(name)
        verdicts = [lose(quarantine, request, now_ns=now_ns) for _ in range(3)]
        assert verdicts[-1] == ([], [name])


def test_one_loss_alone_fails_nobody_after_a_silent_one() -> None:
    quarantine, request = Quarantine(2), make("r1")
    lose(quarantine, request, make("r2"), cause=LossCause.SILENT)
    lose(quarantine, request, make("r2"))
    for _ in range(NUM_ALONE_IN_A_STORM - 1):
        assert lose(quarantine, request) == ([], [])
    assert lose(quarantine, request) == ([], ["r1"])


def test_others_are_tried_no_more_when_their_losses_are_explained() -> None:
    quarantine, poison, innocent = Quarantine(2), make("r1"), make("r2")
    isolate(quarantine, poison, innocent)
    innocent.was_in_flight = False
    assert lose(quarantine, poison, innocent) == ([], ["r1"])
    assert not quarantine.holds(innocent)
    assert innocent.trial_size == 0


def test_others_are_still_tried_when_a_loss_is_unexplained() -> None:
    quarantine, poison, other = Quarantine(2), make("r1"), make("r2")
    isolate(quarantine, poison, other)
    lose(quarantine, other, make("r3"))
    other.was_in_flight = False
    assert lose(quarantine, poison, other) == ([], ["r1"])
    assert quarantine.holds(other)
    other.was_in_flight = True
    assert lose(quarantine, other) == ([], ["r2"])


def test_one_loss_isolates_when_a_request_was_failed_of_late() -> None:
    quarantine = Quarantine(2)
    for _ in range(3):
        lose(quarantine, make("r1"))
    late = STORM_NS - 1
    assert lose(quarantine, make("r2"), make("r3"), now_ns=late) == (["r2", "r3"], [])
    assert lose(quarantine, make("r2"), now_ns=late) == ([], ["r2"])
    quarantine.forget("r3")
    assert lose(quarantine, make("r4"), make("r5"), now_ns=2 * STORM_NS) == ([], [])


def test_last_executor_gets_no_suspect_while_others_may_come_back() -> None:
    quarantine, request = Quarantine(2), make("r1")
    first, second = CoreDriver(), CoreDriver()
    for num_living in (3, 2):
        quarantine.executor_lost([request], Loss(LossCause.DIED, num_living, 0, True, num_living))

    assert list(quarantine.dispatch([first.core], 0)) == []
    assert quarantine.next_look_ns == RETURN_NS
    assert list(quarantine.dispatch([first.core], RETURN_NS - 1)) == []
    assert list(quarantine.dispatch([first.core, second.core], 1)) == [(request, first.core)]
    # The other one is gone again, in whatever way.
    assert quarantine.to_recall([first.core], 2) == [("r1", first.core)]
    quarantine.recalled(request)
    assert list(quarantine.dispatch([first.core], RETURN_NS)) == [(request, first.core)]


def test_only_executor_is_risked_at_once() -> None:
    quarantine, request, driver = Quarantine(2), make("r1"), CoreDriver()
    isolate(quarantine, request)
    assert list(quarantine.dispatch([driver.core], 0)) == [(request, driver.core)]


def isolate(quarantine: Quarantine, *requests: Request) -> None:
    for _ in range(2):
        lose(quarantine, *requests)


def test_dispatch_chooses_the_executor_with_least_work() -> None:
    busy, idle = CoreDriver(), CoreDriver()
    busy.add(50)
    quarantine, requests = Quarantine(2), [make("r1"), make("r2"), make("r3")]
    isolate(quarantine, *requests)
    assert quarantine.num_waiting == 3

    given = []
    for request, host in quarantine.dispatch([busy.core, idle.core], 0):
        assert host is idle.core
        idle.core.readmit(request)
        idle.add(60, f"other {request.request_id}")
        given.append(request.request_id)

    assert given == ["r1", "r2", "r3"]
    assert quarantine.num_waiting == 0
    assert list(quarantine.dispatch([busy.core, idle.core], 0)) == []


def test_dispatch_splits_requests_that_do_not_fit_together() -> None:
    small, large = CoreDriver(num_device_blocks=8), CoreDriver()
    large.add(50)
    quarantine, requests = Quarantine(2), [make("r1", max_tokens=5), make("r2")]
    isolate(quarantine, *requests)
    given = {r.request_id: host for r, host in quarantine.dispatch([small.core, large.core], 0)}
    assert given == {"r1": small.core, "r2": large.core}


def test_life_counts_once_when_it_returns_without_answers() -> None:
    quarantine, request, other = Quarantine(2), make("r1"), make("r2")

    def lose_silent(lost: Request, life: int) -> tuple[list[str], list[str]]:
        return lose(quarantine, lost, cause=LossCause.SILENT, life=life, has_answered=False)

    for _ in range(1 + MAX_REPEATS):
        assert lose_silent(request, 1) == ([], [])
    assert lose_silent(other, 1) == ([], []), "to another it is new"

    assert lose_silent(request, 2) == (["r1"], [])
    assert lose_silent(other, 2) == (["r2"], [])


def test_request_is_failed_when_one_life_returns_for_ever() -> None:
    quarantine, request = Quarantine(2), make("r1")
    most = 1 + MAX_REPEATS + 1 + NUM_ALONE_IN_A_STORM
    verdicts = [
        lose(quarantine, request, cause=LossCause.SILENT, life=1, has_answered=False)
        for _ in range(most)
    ]
    assert [failed for _, failed in verdicts if failed] == [["r1"]]


def test_a_repeated_loss_keeps_who_is_isolated() -> None:
    quarantine, request = Quarantine(2), make("r1")
    isolate(quarantine, request)
    assert lose(quarantine, request, has_answered=False) == ([], [])
    assert quarantine.holds(request)
    assert request.trial_size == 1


def test_waiting_innocent_is_released_when_another_is_guilty() -> None:
    quarantine, poison, innocent = Quarantine(2), make("r1"), make("r2")
    lose(quarantine, poison, innocent)
    assert lose(quarantine, poison, innocent) == (["r1", "r2"], [])
    # No executor takes the innocent one meanwhile.
    verdict = quarantine.executor_lost([poison], Loss(LossCause.DIED, 2, 0, has_answered=True))
    assert [request.request_id for request in verdict.failed] == ["r1"]
    assert verdict.released == verdict.excused == [innocent]
    assert not quarantine.holds(innocent)
    assert quarantine.num_waiting == 0


def test_quarantine_forgets_requests_that_ended() -> None:
    quarantine, driver = Quarantine(2), CoreDriver()
    ended, other = make("r1"), make("r2")
    isolate(quarantine, ended, other)
    given = []
    for request, _ in quarantine.dispatch([driver.core], 0):
        given.append(request.request_id)
        quarantine.forget("r2")
    assert given == ["r1"]
    assert quarantine.num_waiting == 0
    quarantine.forget("r1")
    assert lose(quarantine, other) == ([], []), "the name is another's by now"
