"""Reports as JSON, table and picture, and comparisons."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from splitserve_bench.figures import Recorder, Slo
from splitserve_bench.load import LoadAbandoned, Outcome
from splitserve_bench.reports import (
    ReportUnreadable,
    TargetReport,
    comparison_text,
    picture,
    read_report,
    report_of,
    text_of,
    write_report,
)
from splitserve_bench.targets import AnswerSummary


def report(name: str = "ours", pace_s: float = 0.1, number: int = 200) -> TargetReport:
    """Of requests with a first token after 5 paces or so, and four more a pace apart."""
    recorder = Recorder(Slo.parse("ttft=1s"), 0.0)
    recorder.begin_round(0.0)
    for index in range(number):
        outcome = Outcome(float(index), 5, float(index), answered=AnswerSummary(10, 5, 2, 0))
        first_s = index + pace_s * (4 + index % 3)
        outcome.arrivals_s = [first_s + pace_s * token for token in range(5)]
        outcome.num_tokens = [1] * 5
        outcome.ended_s = outcome.arrivals_s[-1]
        recorder.ended(outcome)
    failed = Outcome(0.0, 5, failed="http_500", message="it \x1b[31mbroke")
    recorder.ended(failed)
    recorder.end_round()
    return report_of(name, "http://host/v1", "a-model", recorder)


def test_report_is_the_same_after_it_was_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    written = [report("ours"), report("theirs", 0.2)]

    write_report(path, {"rate": 2.0}, written)
    read = read_report(path)

    assert [target.name for target in read] == ["ours", "theirs"]
    for before, after in zip(written, read, strict=True):
        assert after.content == json.loads(json.dumps(before.content))
        for metric, parts in before.parts.items():
            assert after.parts[metric] == [part for part in parts if part.num_values]
    assert json.loads(path.read_text())["load"] == {"rate": 2.0}


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format": "other"}', '{"format": "splitserve-bench 1"}']
)
def test_file_is_refused_when_it_is_no_report(content: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(content)

    with pytest.raises(ReportUnreadable, match=r"report\.json: "):
        read_report(path)


def test_table_has_figures_with_intervals_and_what_failed() -> None:
    text = text_of(report())

    assert "200 completed, 1 failed" in text
    assert "2000 in (400 from the prefix cache), 1000 out of 1000 requested" in text
    assert "within ttft 1.00 s (200 of 201)" in text
    lines = text.splitlines()
    (ttft,) = [number for number, line in enumerate(lines) if line.startswith("  ttft")]
    assert lines[ttft].split() == ["ttft", "500", "ms", "500", "ms", *["600", "ms"] * 4]
    # Too few requests to say it of the last hundredth, and of the largest.
    assert lines[ttft + 1].split()[::2] == ["from", *["ms"] * 4]
    assert lines[ttft + 2].split()[::2] == ["to", *["ms"] * 4]
    assert max(map(len, lines)) <= 80
    assert "1 failed with http_500: it \\x1b[31mbroke" in text
    assert "generator" not in text


def recorded(outcome: Outcome, busy_ratio: float) -> str:
    recorder = Recorder(Slo(), 0.0)
    recorder.begin_round(0.0)
    recorder.ended(outcome)
    recorder.worked(busy_ratio)
    recorder.end_round()
    return text_of(report_of("ours", "http://host/v1", "a-model", recorder))


LIMIT = "The generator limits the measurement"


def test_table_says_how_late_and_how_busy_the_generator_was() -> None:
    text = recorded(Outcome(0.0, 1, 0.002, 1.0, [1.0], [1]), 0.5)

    assert "p99 send delay 2.00 ms; 50% busy" in text
    assert LIMIT not in text


@pytest.mark.parametrize(("sent_s", "busy_ratio"), [(0.5, 0.5), (0.0, 0.97)])
def test_table_warns_when_the_generator_was_the_limit(sent_s: float, busy_ratio: float) -> None:
    assert LIMIT in recorded(Outcome(0.0, 1, sent_s, 1.0, [1.0], [1]), busy_ratio)


def test_table_names_the_target_when_max_open_held_requests() -> None:
    text = recorded(Outcome(0.0, 1, 0.5, 1.0, [1.0], [1], held_s=0.5), 0.5)

    assert "1 requests were delayed by --max-open: the target was overloaded" in text
    assert LIMIT not in text


def test_table_says_that_a_round_was_given_up() -> None:
    warned: list[LoadAbandoned] = []
    recorder = Recorder(Slo(), 0.0, warn=warned.append)
    recorder.begin_round(0.0)
    recorder.gave_up(LoadAbandoned(30.0, 30.0, 60))
    recorder.gave_up(LoadAbandoned(31.0, 32.0, 36))
    recorder.ended(Outcome(0.0, 1, 0.0, 1.0, is_interrupted=True))
    recorder.end_round()
    target = report_of("ours", "http://host/v1", "a-model", recorder)

    text = text_of(target)
    assert "The load of round 1 is incomplete: after 32.0 s it was 31.0 s late" in text
    assert "96 conversations had begun, 3.0 per second." in text
    assert "The run was stopped: 1 unfinished requests" in text
    assert warned == [LoadAbandoned(30.0, 30.0, 60)]
    (said,) = target.content["given_up"]
    assert said == {"round": 0, "behind_s": 31.0, "after_s": 32.0, "num_begun": 96}


def test_table_is_there_when_everything_failed() -> None:
    recorder = Recorder(Slo(), 0.0)
    recorder.begin_round(0.0)
    outcome = Outcome(0.0, 1, failed="timeout", message="too late")
    recorder.ended(outcome)
    recorder.end_round()
    target = report_of("ours", "http://host/v1", "a-model", recorder)

    assert "0 completed, 1 failed" in text_of(target)
    assert "ours compared with ours" in comparison_text(target, target)
    ElementTree.fromstring(picture("nothing", [target]))


def test_comparison_says_longer_only_when_significant() -> None:
    text = comparison_text(report("ours"), report("theirs", 0.11))
    lines = {line.split("  ")[1].strip(): line for line in text.splitlines()[2:]}

    assert lines["ttft p50"].endswith("longer")
    assert "1.101  [1.101, 1.101]" in lines["ttft p50"]  # within 0.2 %
    same = comparison_text(report("ours"), report("theirs"))
    assert "longer" not in same
    assert "shorter" not in same
    assert "1.000  [" in same


def test_comparison_of_rates_has_the_range_of_rounds() -> None:
    def with_rounds(name: str, *per_s: float) -> TargetReport:
        made = report(name)
        first = made.content["rounds"][0]
        rounds = [first | {"requests_per_s": rate} for rate in per_s]
        return TargetReport(name, {**made.content, "rounds": rounds}, made.parts)

    text = comparison_text(with_rounds("ours", 2, 4, 5), with_rounds("theirs", 3, 3, 5))

    (line,) = [line for line in text.splitlines() if line.startswith("  requests_per_s")]
    assert line.endswith("0.750 to 1.500")


def test_picture_is_svg_that_needs_nothing_else_and_names_all() -> None:
    text = picture("a <title>", [report("ours & co"), report("theirs", 0.2)])

    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a <title>", "ours & co", "theirs", "99 %", "500 ms"} <= set(texts)
    lines = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines) == 2 * 5
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for line in lines:
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height
    assert "href" not in text
    assert "<script" not in text


def test_picture_of_latencies_rises_to_the_right() -> None:
    root = ElementTree.fromstring(picture("x", [report()]))

    first = next(root.iter("{http://www.w3.org/2000/svg}polyline"))
    points = [tuple(map(float, point.split(","))) for point in first.attrib["points"].split()]
    assert all(a[0] < b[0] and a[1] >= b[1] for a, b in itertools.pairwise(points))
    assert points[0][1] > points[-1][1]


def test_picture_has_a_long_title_and_names_given_up_load() -> None:
    made = report("ours")
    given_up = [{"round": 0, "behind_s": 30.0, "after_s": 31.0, "num_begun": 5}]
    target = TargetReport("ours", {**made.content, "given_up": given_up}, made.parts)

    root = ElementTree.fromstring(picture("long " * 38, [target]))
    head, *others = root.iter("{http://www.w3.org/2000/svg}text")
    assert head.attrib["style"] == "font-size: 8.0px"
    assert "ours (incomplete load)" in {each.text for each in others}
