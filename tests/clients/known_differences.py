"""The table of differences in a page of the docs: `read_table`, `Known`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tests.clients.shape import Difference


@dataclass(frozen=True, slots=True)
class Known:
    """A row of the table. `request` and `path` may have several patterns, and `*` in them."""

    request: str
    path: str
    theirs: str
    ours: str

    def covers(self, found: Difference) -> bool:
        """Whether the row tells of `found`."""
        pairs = zip(
            (self.request, self.path, self.theirs, self.ours),
            (found.request, found.path, found.theirs, found.ours),
            strict=True,
        )
        return all(_matches(patterns, text) for patterns, text in pairs)


def _matches(patterns: str, text: str) -> bool:
    return any(
        re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), text, re.DOTALL)
        for pattern in patterns.split(", ")
    )


def read_table(markdown: str, heading: str) -> list[Known]:
    """The rows below `heading`: request, path, theirs, ours, and why, which is for people."""
    section = markdown.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [
        Known(*(cell.strip().replace("`", "") for cell in row.strip("|").split("|")[:4]))
        for row in rows
    ]


def unknown(found: Iterable[Difference], known: Iterable[Known]) -> list[Difference]:
    """What no row tells."""
    return [item for item in found if not any(row.covers(item) for row in known)]


def outdated(found: Iterable[Difference], known: Iterable[Known]) -> list[Known]:
    """Rows that tell of nothing that was found."""
    return [row for row in known if not any(row.covers(item) for item in found)]
