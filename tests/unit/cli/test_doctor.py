"""`splitserve doctor` when its own packages are missing."""

from __future__ import annotations

import json
import sys

import pytest

from splitserve_cli import doctor


def test_doctor_says_so_when_a_package_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As if it could not be imported.
    monkeypatch.setitem(sys.modules, "splitserve_cli.examination", None)

    assert doctor.main(["--json"]) == 1

    told = json.loads(capsys.readouterr().out)
    first = told["findings"][0]
    assert (first["name"], first["state"], told["is_well"]) == ("imports", "wrong", False)
    assert first["found"].startswith("ModuleNotFoundError: ")
    assert sys.executable in first["meaning"]


def test_doctor_says_so_when_even_what_compares_versions_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("splitserve_cli.examination", "splitserve_cli.checks.packages"):
        monkeypatch.setitem(sys.modules, name, None)

    assert doctor.main([]) == 1

    assert capsys.readouterr().out.splitlines()[-1] == "1 wrong, 0 warnings, 0 ok"
