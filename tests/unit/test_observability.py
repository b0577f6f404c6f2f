"""Rules and dashboard ask for metrics that there are; every alert fires, and has its page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml  # type: ignore[import-untyped]

from splitserve_metrics import EXECUTOR_METRICS, GATEWAY_METRICS, SCHEDULER_METRICS, MetricKind

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "observability"
ALERTS = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
FIRED = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
DASHBOARD = json.loads((FOLDER / "grafana" / "dashboards" / "splitserve.json").read_text())
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
TARGETS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
MARKS = [mark["expr"] for mark in DASHBOARD["annotations"]["list"]]
EXPRESSIONS = [*(rule["expr"] for rule in ALERTS), *TARGETS, *MARKS]
# Of Prometheus itself, and of its client.
OTHERS = {"up", "process_cpu_seconds_total", "process_resident_memory_bytes"}
ADDED_LABELS = {"job", "instance", "le"}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool: Debian's prometheus has it"
)


def samples() -> dict[str, set[str]]:
    """The labels of every sample that processes show, by its name."""
    found: dict[str, set[str]] = {name: set() for name in OTHERS}
    for metric in (*SCHEDULER_METRICS, *EXECUTOR_METRICS, *GATEWAY_METRICS):
        is_histogram = metric.kind is MetricKind.HISTOGRAM
        for suffix in ("_bucket", "_count", "_sum") if is_histogram else ("",):
            found[metric.name + suffix] = set(metric.labels)
    return found


def selectors(node: Any) -> Iterator[promql_parser.VectorSelector]:  # noqa: ANN401
    """Those of an expression, wherever they stand."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "param", "vector_selector"):
        child = getattr(node, name, None)
        if child is not None and child is not node:
            yield from selectors(child)
    for child in getattr(node, "args", None) or ():
        yield from selectors(child)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_ask_for_metrics_and_labels_that_there_are(expression: str) -> None:
    parsed = promql_parser.parse(expression.replace("$__rate_interval", "1m"))
    found = list(selectors(parsed))
    known = samples()

    assert found
    for selector in found:
        assert selector.name is not None
        assert selector.name in known
        named = {matcher.name for matcher in selector.matchers.matchers}
        assert named <= known[selector.name] | ADDED_LABELS
    grouped = {
        label.strip()
        for labels in re.findall(r"by \(([^)]*)\)", expression)
        for label in labels.split(",")
    }
    labels = set().union(*(known[selector.name or ""] for selector in found))
    assert grouped <= labels | ADDED_LABELS


def test_every_alert_links_to_a_page_that_there_is() -> None:
    document = (ROOT / "docs" / "operations.md").read_text()
    section = document.partition("\n## Alerts\n")[2].partition("\n## ")[0]
    pages = re.findall(r"^### (\w+)$", section, re.MULTILINE)

    assert pages == [rule["alert"] for rule in ALERTS]
    for rule in ALERTS:
        anchor = rule["alert"].lower()
        assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{anchor}"
        assert rule["labels"]["severity"] in ("page", "warning")


def test_every_alert_is_made_to_fire_and_none_fires_when_all_is_well() -> None:
    *firing, well = FIRED
    fired = [each["alert_rule_test"][0]["alertname"] for each in firing]
    alerts = [rule["alert"] for rule in ALERTS]

    assert fired == alerts
    assert all(each["alert_rule_test"][0]["exp_alerts"] for each in firing)
    assert {each["alertname"] for each in well["alert_rule_test"]} == set(alerts)
    assert not any(each["exp_alerts"] for each in well["alert_rule_test"])


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "--lint=all", "--lint-fatal", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
    ],
    ids=lambda arguments: arguments[-1],
)
def test_promtool_is_content(arguments: tuple[str, ...]) -> None:
    result = subprocess.run(
        ["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stdout + result.stderr


def test_compose_starts_what_reads_only_when_it_is_asked_to() -> None:
    asked = {name for name, each in COMPOSE["services"].items() if each.get("profiles") is not None}

    assert asked == {"prometheus", "grafana"}
    for name in asked:
        service = COMPOSE["services"][name]
        assert service["profiles"] == ["observability"]
        assert all(port.split(":-")[1].startswith("127.0.0.1:") for port in service["ports"])
        for volume in service["volumes"]:
            assert (ROOT / volume.split(":")[0]).exists()


def test_descriptions_of_panels_name_alerts_that_there_are() -> None:
    text = " ".join(panel["description"] for panel in DASHBOARD["panels"])
    named = set(re.findall(r"\bSplitserve\w+", text))

    assert named
    assert named <= {rule["alert"] for rule in ALERTS}


def test_numbers_have_their_units_and_red_means_something() -> None:
    for panel in DASHBOARD["panels"]:
        defaults = panel["fieldConfig"]["defaults"]
        asked = panel["targets"][0]["expr"]
        if "rate(" in asked and "histogram_quantile" not in asked and "/" not in asked:
            # CPU seconds a second are cores.
            assert (defaults["unit"] == "none") == ("process_cpu" in asked), panel["title"]
        # Without its own, Grafana has whatever is above 80 in red.
        if panel["type"] == "stat":
            assert defaults["thresholds"]["steps"], panel["title"]


def test_questions_go_to_the_data_source_and_the_executors_that_are_chosen() -> None:
    listed = DASHBOARD["templating"]["list"]
    variables = {variable["name"]: variable for variable in listed}
    asking = [*DASHBOARD["panels"], *DASHBOARD["annotations"]["list"], variables["executor"]]

    assert set(variables) == {"datasource", "executor"}
    assert {each["datasource"]["uid"] for each in asking} == {"${datasource}"}
    provisioned = FOLDER / "grafana" / "provisioning" / "datasources" / "prometheus.yml"
    (source,) = yaml.safe_load(provisioned.read_text())["datasources"]
    assert variables["datasource"]["current"]["value"] == source["uid"]
    found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variables["executor"]["query"])
    assert found is not None
    assert found[2] in samples()[found[1]]
    chosen = {name for expr in TARGETS for name in re.findall(r"\$(\w+)", expr)}
    assert chosen == {"__rate_interval", "executor"}


def test_panels_say_what_they_show_and_lie_beside_each_other() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]

    assert all(panel["title"] and len(panel["description"]) > 10 for panel in DASHBOARD["panels"])
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
