"""Checks of options."""

from __future__ import annotations

from pathlib import Path

from splitserve_cli.checks.finding import State, check_settings, listened_at


def test_settings_are_wrong_when_file_is_invalid(tmp_path: Path) -> None:
    file = tmp_path / "splitserve.toml"
    file.write_text("max-num-seqs = 0\n")
    (finding,), values = check_settings("scheduler", file, {})
    assert (finding.state, values) == (State.WRONG, {})
    assert "max-num-seqs" in finding.found
    file.write_text("max-num-seqs = 8\n")
    (finding,), values = check_settings("scheduler", file, {})
    assert (finding.state, values["max_num_seqs"]) == (State.OK, 8)


def test_variable_that_nobody_reads_is_warned_of() -> None:
    findings, _ = check_settings("gateway", None, {"SPLITSERVE_HTPP": "x"})
    assert [each.state for each in findings] == [State.OK, State.WARNING]
    assert "SPLITSERVE_HTPP" in findings[1].found


def test_addresses_are_those_that_a_process_listens_at() -> None:
    _, values = check_settings("scheduler", None, {"SPLITSERVE_CLUSTER_LISTEN": "127.0.0.1:7"})
    addresses = dict(listened_at("scheduler", values))
    assert addresses["cluster-listen"] == "127.0.0.1:7"
    assert "listen" in addresses


def test_metrics_addresses_are_one_per_process() -> None:
    _, values = check_settings(
        "serve",
        None,
        {"SPLITSERVE_METRICS_LISTEN": "127.0.0.1:9100", "SPLITSERVE_NUM_EXECUTORS": "2"},
    )
    addresses = [address for option, address in listened_at("serve", values) if "metrics" in option]
    assert addresses == [f"127.0.0.1:{port}" for port in (9100, 9101, 9102, 9103)]
