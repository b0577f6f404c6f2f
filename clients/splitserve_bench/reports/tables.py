"""What a terminal shows: a table for one target, or several beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from splitserve_bench.figures.quantities import seconds_text
from splitserve_bench.reports.report import FIGURE_NAMES, TargetReport
from splitserve_rpc.printable import printable

# Beyond these, and what was measured is also this generator.
_MOST_SEND_DELAY_S = 0.01
_MOST_BUSY_RATIO = 0.85


def text_of(target: TargetReport) -> str:
    """Everything that people look at first."""
    content = target.content
    requests, rates = content["requests"], content["rates"]
    lines = [
        f"{printable(target.name)}: {printable(content['model'])} at {printable(content['url'])}",
        f"  requests    {requests['num_completed']} completed, {requests['num_failed']} failed,"
        f" {requests['num_warm_up']} of the warm-up not counted",
        f"  tokens      {requests['num_prompt_tokens']} in"
        f" ({requests['num_cached_tokens']} from the prefix cache),"
        f" {requests['num_output_tokens']} out of {requests['num_wanted_tokens']} wanted",
        f"  throughput  {rates['requests_per_s']:.2f} requests/s,"
        f" {rates['output_tokens_per_s']:.1f} tokens/s out,"
        f" {rates['prompt_tokens_per_s']:.1f} in",
    ]
    if content["slo_s"]:
        limits = ", ".join(
            f"{name} {seconds_text(limit)}" for name, limit in content["slo_s"].items()
        )
        num_all = requests["num_completed"] + requests["num_failed"]
        lines.append(
            f"  goodput     {rates['good_requests_per_s']:.2f} requests/s within {limits}"
            f" ({requests['num_good']} of {num_all})"
        )
    lines += _generator_line(content)
    lines += [""] + ["  " + line for line in _latency_lines(content["latency_s"])]
    lines += _notes(content)
    return "\n".join(lines) + "\n"


def _latency_lines(latency: dict[str, Any]) -> list[str]:
    """A table of at most 78 columns: below each figure, from where to where it may be."""
    rows = [["", *FIGURE_NAMES, "largest"]]
    for metric, figures in latency.items():
        if figures:
            cells = [seconds_text(figures[name]["value"]) for name in FIGURE_NAMES]
            rows.append([metric, *cells, seconds_text(figures["largest"])])
            rows += _interval_rows([figures[name] for name in FIGURE_NAMES])
    return aligned(rows)


def _interval_rows(figures: Sequence[dict[str, float | None]]) -> list[list[str]]:
    """Two rows, without a cell where there are too few requests to say; none if all are without."""
    rows = []
    for name, bound in (("from", "low"), ("to", "high")):
        values = [figure[bound] for figure in figures]
        if any(value is not None for value in values):
            cells = ["" if value is None else seconds_text(value) for value in values]
            rows.append([f"  {name}", *cells, ""])
    return rows


def _generator_line(content: Any) -> list[str]:  # noqa: ANN401
    """How late it was itself, and how busy; nothing where nothing was measured."""
    delay, busy_ratio = content["latency_s"]["send_delay"], content["generator_busy_ratio"]
    if not delay or busy_ratio is None:
        return []
    late = seconds_text(delay["p99"]["value"])
    return [f"  generator   1 in 100 requests sent {late} late or more; {busy_ratio:.0%} busy"]


def _is_limit(content: Any) -> bool:  # noqa: ANN401
    delay, busy_ratio = content["latency_s"]["send_delay"], content["generator_busy_ratio"]
    is_late = bool(delay) and delay["p99"]["value"] > _MOST_SEND_DELAY_S
    return is_late or (busy_ratio or 0.0) > _MOST_BUSY_RATIO


def _notes(content: Any) -> list[str]:  # noqa: ANN401
    requests = content["requests"]
    notes = [
        f"  {entry['count']} failed with {printable(kind)}: {printable(entry['first'])}"
        for kind, entry in content["errors"].items()
    ]
    if requests["num_interrupted"]:
        notes.append(
            f"  The run was stopped: {requests['num_interrupted']} requests had no end yet, and are"
            " in no figure."
        )
    notes += [f"  {_given_up(each)}" for each in content["given_up"]]
    if requests["num_held"]:
        notes.append(
            f"  {requests['num_held']} requests waited since --max-open others had no end yet: the"
            " target was behind. Their latencies count from when they were due."
        )
    if _is_limit(content):
        notes.append(
            "  This generator, and not only the target, is what was measured: give it more"
            " --processes, or a machine of its own."
        )
    return ["", *notes] if notes else []


def _given_up(entry: Mapping[str, Any]) -> str:
    """That a round was not put on as it was meant, and what that says of its figures."""
    num_begun, after_s = entry["num_begun"], entry["after_s"]
    return (
        f"Round {entry['round'] + 1} was not put on as asked: after {seconds_text(after_s)} it was"
        f" {seconds_text(entry['behind_s'])} behind, and nothing more was sent (--max-behind)."
        f" {num_begun} conversations had begun, {num_begun / max(after_s, 1e-9):.1f} a second. What"
        " was due and never sent is in no figure, so all look better than they are: give a lower"
        " --rate, or find the most that the target can do by --concurrency."
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of a width; the first stands left, numbers right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
