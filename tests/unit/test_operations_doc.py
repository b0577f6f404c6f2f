"""docs/operations.md says what to do about every refusal.

Metrics: `metrics/test_tables`; alerts: `test_observability`; events: `test_log_events`; commands:
`test_operations_commands`.
"""

from __future__ import annotations

import re
from pathlib import Path

from scheduler_service.scheduler.values import FinishReason
from scheduler_service.service import Readiness
from splitserve_rpc import CODE_OF_REASON

DOCS = Path(__file__).resolve().parents[2] / "docs"
OPERATIONS = (DOCS / "operations.md").read_text()
# Of requests whose client had gone.
ABANDONED = "abandoned"


def section(title: str) -> str:
    found = OPERATIONS.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert found, title
    return found


def first_cells(text: str) -> list[str]:
    """Every name in the first column of its tables."""
    cells = re.findall(r"^\| (`[^|]+`) \|", text, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def test_every_refusal_and_every_end_has_something_to_do() -> None:
    in_finish = re.findall(
        r"^\| `([A-Z_]+)` \| in a `finish`", (DOCS / "client.md").read_text(), re.MULTILINE
    )
    ends = [reason.value for reason in FinishReason]

    listed = first_cells(section("Refusals and ends of requests"))
    assert sorted(listed) == sorted({*CODE_OF_REASON, *in_finish, *ends, ABANDONED})


def test_every_readiness_has_something_to_do() -> None:
    text = section("Health, draining and replacement")

    for readiness in Readiness:
        assert f"\n| {readiness.value} |" in text


def test_links_within_the_document_lead_somewhere() -> None:
    titles = re.findall(r"^#+ (.+)$", OPERATIONS, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}

    assert set(re.findall(r"\]\(#([^)]+)\)", OPERATIONS)) <= anchors
