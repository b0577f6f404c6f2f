"""The dashboard is what Grafana reads: its own models have a place for everything in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "observability" / "grafana" / "dashboards"
CONTENT = json.loads((FOLDER / "splitserve.json").read_text())


def lost(before: Any, after: Any, place: str = "") -> Iterator[str]:  # noqa: ANN401  (JSON)
    """Where `after` has not what `before` has; it may have more."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name, value in before.items():
            yield from lost(value, after.get(name), f"{place}.{name}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from lost(one, other, f"{place}[{index}]")
    elif before != after:
        yield place


def understood(content: dict[str, Any]) -> dict[str, Any]:
    """What Grafana's models keep of it."""
    register_default_plugins()
    kept: dict[str, Any] = json.loads(JSONEncoder().encode(Dashboard.from_json(content)))
    return kept


def test_nothing_of_the_dashboard_is_unknown_to_grafana() -> None:
    assert list(lost(CONTENT, understood(CONTENT))) == []


def test_what_grafana_does_not_know_is_found() -> None:
    content = json.loads(json.dumps(CONTENT))
    content["panels"][3]["titel"] = "Requests"
    content["panels"][4]["targets"][0]["expression"] = "up"

    found = list(lost(content, understood(content)))
    assert found == [".panels[3].titel", ".panels[4].targets[0].expression"]
