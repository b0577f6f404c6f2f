"""Reports of targets with known delays, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from splitserve_bench.figures import Recorder, Slo
from splitserve_bench.load import LocalLoad, Pace, TargetUnusable
from splitserve_bench.reports import TargetReport, report_of
from splitserve_bench.runs import RunConfig, run_load
from splitserve_bench.targets import AnswerSummary, AskFailed
from splitserve_bench.workloads import Conversation
from tests.support.bench.targets import Script, ScriptedTarget, at, run_virtually

EXACT = 0.0011  # what a histogram's classes are wide


def measure(
    script: Callable[[int], Script],
    conversations: list[Conversation],
    num_served: int = 10**6,
    **config: Any,  # noqa: ANN401
) -> TargetReport:
    # The first that a target is asked is a probe, before the load.
    target = ScriptedTarget(lambda number: script(max(number - 1, 0)), num_served)
    pace = config.pop("pace", Pace())
    load = LocalLoad([("it", target)], lambda: iter(conversations), pace)
    run = run_load(load, 1, RunConfig(pace, **config), drop)
    ((model, recorder),) = run_virtually(run)
    return report_of("it", "test://it", model, recorder)


def drop(_num_tokens: int) -> None:
    pass


def figure(report: TargetReport, metric: str, name: str) -> float:
    value: float = report.content["latency_s"][metric][name]["value"]
    return value


def test_figures_are_the_delays_of_the_target() -> None:
    # Token after 0.4 s, then 3 tokens after 0.3 s, then 1 after 0.1 s; the end 0.2 s later.
    script = Script([(0.4, 1), (0.3, 3), (0.1, 1)], end_s=0.2)

    report = measure(lambda _number: script, at(*range(20)))

    assert figure(report, "ttft", "p50") == pytest.approx(0.4)
    assert figure(report, "e2e", "p99") == pytest.approx(1.0)
    assert figure(report, "tpot", "mean") == pytest.approx(0.4 / 4)
    assert figure(report, "gap", "mean") == pytest.approx(0.2)
    assert figure(report, "itl", "mean") == pytest.approx(0.1)
    assert figure(report, "gap", "p90") == pytest.approx(0.3, rel=EXACT)
    assert figure(report, "itl", "p99") == pytest.approx(0.1, rel=EXACT)
    assert figure(report, "send_delay", "p99") == pytest.approx(0, abs=1e-9)
    requests = report.content["requests"]
    assert (requests["num_completed"], requests["num_failed"]) == (20, 0)
    assert (requests["num_prompt_tokens"], requests["num_output_tokens"]) == (200, 100)
    # The first is due at 0, the last at 19 s, and ends a second later.
    rates = report.content["rates"]
    assert rates["requests_per_s"] == pytest.approx(1.0)
    assert rates["output_tokens_per_s"] == pytest.approx(5.0)
    assert rates["prompt_tokens_per_s"] == pytest.approx(10.0)


def test_queue_of_the_target_is_in_every_latency() -> None:
    """One place, 2 s a request, one request a second: request n waits for n seconds."""
    report = measure(lambda _number: Script([(2.0, 1)]), at(*range(10)), num_served=1)

    assert figure(report, "ttft", "p50") == pytest.approx(2.0 + 4, rel=EXACT)
    assert report.content["latency_s"]["ttft"]["largest"] == pytest.approx(2.0 + 9)
    assert figure(report, "send_delay", "p99") == pytest.approx(0, abs=1e-9)
    assert max(report.content["timelines"][0]["num_waiting"]) == 6


def test_tokens_share_a_gap_evenly_when_uncounted() -> None:
    script = Script([(1.0, None), (0.6, None), (0.6, None)], answered=AnswerSummary(10, 5))

    report = measure(lambda _number: script, at(0))

    # The picture has as many tokens as there were.
    assert sum(report.content["timelines"][0]["num_tokens"]) == pytest.approx(5)

    # Four tokens in two gaps of 0.6 s.
    assert figure(report, "itl", "mean") == pytest.approx(0.3)
    assert figure(report, "gap", "mean") == pytest.approx(0.6)
    assert figure(report, "tpot", "mean") == pytest.approx(0.3)


def test_warm_up_is_left_out_of_every_figure() -> None:
    slow, quick = Script([(3.0, 1)]), Script([(0.5, 1)])

    report = measure(lambda n: slow if n < 4 else quick, at(*range(10)), warm_up_s=4.0)

    requests = report.content["requests"]
    assert (requests["num_warm_up"], requests["num_completed"]) == (4, 6)
    assert report.content["latency_s"]["ttft"]["largest"] == pytest.approx(0.5)
    # From 4 s, when the first that counts is due, to 9.5 s.
    assert report.content["rates"]["requests_per_s"] == pytest.approx(6 / 5.5)


# Ten requests: 0 and 1 have a late first token (0.6 s, else 0.4), 4 to 9 a gap of 0.3 s (else 0.2),
# and odd ones get two tokens after it (else one).
@pytest.mark.parametrize(
    ("slo", "num_good"),
    [
        ("ttft=500ms", 8),
        ("gap=250ms", 4),
        ("ttft=500ms,gap=250ms", 2),
        ("itl=150ms", 5),
        ("itl=149ms", 2),
        ("tpot=99ms", 0),
        ("e2e=900ms", 10),
        ("e2e=700ms", 8),
    ],
)
def test_goodput_is_of_requests_that_keep_every_limit(slo: str, num_good: int) -> None:
    def script(number: int) -> Script:
        gap_s = 0.3 if number >= 4 else 0.2
        return Script([(0.6 if number < 2 else 0.4, 1), (gap_s, 1 + number % 2)])

    # A little more, as sums of seconds are not exact.
    loose = Slo(tuple((name, limit_s + 1e-6) for name, limit_s in Slo.parse(slo).limits_s))
    report = measure(script, at(*range(10)), slo=loose)

    assert report.content["requests"]["num_good"] == num_good
    seconds = report.content["rounds"][0]["duration_s"]
    assert report.content["rates"]["good_requests_per_s"] == pytest.approx(num_good / seconds)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "ttft=1s,ttft=2s", "speed=1s", "itl=-1s"])
def test_slo_is_refused_when_malformed(text: str) -> None:
    with pytest.raises(ValueError, match="allowed: "):
        Slo.parse(text)


def test_errors_are_counted_by_kind_and_in_no_latency() -> None:
    def script(number: int) -> Script:
        failure = AskFailed(f"kind_{number % 3}", f"request {number}") if number % 3 else None
        return Script([(0.1, 1)] if failure is None else [(50.0, 1)], failure=failure)

    report = measure(script, at(*range(9)), slo=Slo.parse("ttft=1s"))

    assert report.content["errors"] == {
        "kind_1": {"count": 3, "first": "request 1"},
        "kind_2": {"count": 3, "first": "request 2"},
    }
    requests = report.content["requests"]
    assert (requests["num_completed"], requests["num_failed"], requests["num_good"]) == (3, 6, 3)
    assert report.content["latency_s"]["e2e"]["largest"] == pytest.approx(0.1)


def test_kinds_of_errors_are_bounded() -> None:
    def script(number: int) -> Script:
        failure = AskFailed(f"kind_{number}", "x" * 10_000) if number else None
        return Script([(0.1, 1)], failure=failure)

    report = measure(script, at(*range(101)))

    errors = report.content["errors"]
    assert len(errors) == 33
    assert errors["others"]["count"] == 68
    assert max(len(entry["first"]) for entry in errors.values()) <= 300


def test_targets_take_turns_with_the_same_load_and_other_prompts() -> None:
    order: list[str] = []

    def named(name: str) -> ScriptedTarget:
        def script(_number: int) -> Script:
            order.append(name)
            return Script([(0.5 if name == "a" else 1.0, 1)])

        return ScriptedTarget(script)

    targets = [("a", named("a")), ("b", named("b"))]
    config = RunConfig(Pace(), num_rounds=3)

    load = LocalLoad(targets, lambda: iter(at(0, 1)), config.pace)
    measured = run_virtually(run_load(load, 2, config, drop))

    assert "".join(order) == "ab" + "aabb" + "bbaa" + "aabb"
    for (_, recorder), ttft_s in zip(measured, (0.5, 1.0), strict=True):
        assert isinstance(recorder, Recorder)
        assert recorder.counts.num_completed == 6
        assert len(recorder.rounds) == 3
        assert recorder.parts.of("ttft")[0].mean == pytest.approx(ttft_s)
    salts = [salt for _, target in targets for salt in dict.fromkeys(target.salts[1:])]
    assert len(set(salts)) == 6


def test_target_that_does_not_answer_is_known_before_the_load() -> None:
    refusing = ScriptedTarget(lambda _n: Script([], failure=AskFailed("http_401", "who are you?")))

    def conversations() -> Iterator[Conversation]:
        raise AssertionError("nothing is sent")

    load = LocalLoad([("it", refusing)], conversations, Pace())
    with pytest.raises(TargetUnusable, match=r"^it: who are you\? \[http_401\]$"):
        run_virtually(run_load(load, 1, RunConfig(Pace()), drop))


def test_what_is_kept_does_not_grow_with_the_run() -> None:
    report = measure(
        lambda n: Script([(0.1 + n % 7 / 10, 1), (0.05, 1)]),
        at(*[number / 4 for number in range(4000)]),
    )

    (timeline,) = report.content["timelines"]
    assert len(timeline["num_sent"]) <= 512
    assert sum(timeline["num_sent"]) == sum(timeline["num_completed"]) == 4000
    assert sum(timeline["num_tokens"]) == 8000
    assert len(report.parts["ttft"]) < 64


def test_run_that_is_stopped_reports_what_had_ended_by_then() -> None:
    target = ScriptedTarget(lambda _number: Script([(0.5, 1), (1.0, 1)]))

    async def main() -> list[tuple[str, Recorder]]:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.call_at(10.2, stop.set)
        config = RunConfig(Pace(), num_rounds=5)
        load = LocalLoad([("it", target)], lambda: iter(at(*range(100))), config.pace)
        measured = await run_load(load, 1, config, drop, stop)
        assert loop.time() == pytest.approx(10.2)
        return measured

    ((_, recorder),) = run_virtually(main())

    # Of the probe's 1.5 s and a lead of 0.05 s on, one a second; those of the last 1.5 s are open.
    assert recorder.counts.num_completed == 8
    assert (recorder.counts.num_failed, len(recorder.rounds)) == (0, 1)
