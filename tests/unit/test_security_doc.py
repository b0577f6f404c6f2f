"""docs/limits.md names tests and options that there are; lines of docs/security.md are taken."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from executor_service.config import ExecutorConfig
from scheduler_service.config import SchedulerServiceConfig
from splitserve_cli.main import main
from splitserve_cli.serve_config import check_callers, check_http, check_loopback
from splitserve_gateway.config import GatewayConfig
from splitserve_options import COMMANDS, OPTIONS, options
from tests.support.processes.addresses import reserve_address
from tests.support.security.cluster import Certificates

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "security.md").read_text()
LIMITS = (ROOT / "docs" / "limits.md").read_text()
BLOCKS = [
    block
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", DOCUMENT, re.M | re.S)
    if not language
]
LINES = [
    shlex.split(line.replace("\\\n", " ").partition(" > ")[0])
    for block in BLOCKS
    for line in re.split(r"(?<!\\)\n", block)
    if line.startswith("splitserve ")
]
CHECKS: dict[str, Callable[[Mapping[str, Any]], object]] = {
    "scheduler": SchedulerServiceConfig.from_options,
    "executor": ExecutorConfig.from_options,
    "gateway": GatewayConfig.from_options,
}


def test_limits_doc_names_tests_and_options_that_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", LIMITS))
    options = set(re.findall(r"`(--[a-z-]+)", LIMITS))

    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert named
    assert named - tests == set()
    assert options - {option.flag for option in OPTIONS} == set()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with certificates."""
    return Certificates.make(tmp_path_factory.mktemp("splitserve")).directory


def test_every_line_is_one_that_is_tried_here() -> None:
    assert {line[1] for line in LINES} == {*COMMANDS, "certs", "keys", "info"}


@pytest.mark.parametrize("line", [line for line in LINES if line[1] in COMMANDS], ids=shlex.join)
def test_line_is_what_its_process_takes(line: list[str], made: Path) -> None:
    _, command, *flags = (word.replace("/etc/splitserve", str(made)) for word in line)
    (known,) = [name for name in COMMANDS if name == command]
    values = options.parse(known, flags, {})
    if known != "serve":
        CHECKS[known](values)
        return
    check_loopback("listen", values["listen"])
    check_loopback("cluster-listen", values["cluster_listen"])
    check_http(values)
    check_callers(values)


def test_lines_of_certificates_keys_and_operators_do_as_they_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "etc").mkdir()
    key_id = ""
    for _, command, *flags in LINES:
        argv = [flag.replace("/etc/splitserve", "etc") for flag in flags]
        if command == "info":
            # Nobody is there; as far as that it has to come.
            assert main(["info", *argv, "--address", reserve_address()]) == 1
            assert "no server answers" in capsys.readouterr().err
        elif command in {"certs", "keys"}:
            argv = [key_id if re.fullmatch("[0-9a-f]{12}", word) else word for word in argv]
            assert main([command, *argv]) == 0, capsys.readouterr().err
            _, found, rest = capsys.readouterr().out.partition("sk-ss-")
            key_id = rest.partition("-")[0] if found else key_id


def test_keys_are_redirected_to_files_of_their_owner() -> None:
    keeping = [block for block in BLOCKS if re.search("^splitserve keys add .* > ", block, re.M)]
    assert keeping
    assert [block for block in keeping if "umask 077\n" not in block.partition(" > ")[0]] == []
