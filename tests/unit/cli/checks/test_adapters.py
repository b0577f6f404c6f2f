"""Adapters that options name: what `splitserve doctor` and `splitserve serve` find of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitserve_cli.checks.adapters import check_adapters
from splitserve_cli.checks.finding import State
from splitserve_cli.serve_config import CannotServe
from splitserve_cli.serve_config import check_adapters as check_before_serving
from splitserve_options import options


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A folder that has the files of an adapter."""
    folder = tmp_path / "formal"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"12345678")
    return folder


def found(*flags: str) -> list[tuple[str, State, str]]:
    values = options.parse("scheduler", flags, {})
    return [(each.name, each.state, each.found) for each in check_adapters(values)]


def test_adapters_are_well_when_they_have_their_files(adapter: Path) -> None:
    file = adapter.parent / "adapters"
    file.write_text(f"# all of them\n\nformal = {adapter}\n")
    assert found(
        f"--adapter=a={adapter}", f"--adapters-file={file}", f"--adapters-dir={adapter.parent}"
    ) == [
        ("adapter a", State.OK, f"{adapter}, 10 bytes"),
        ("adapter formal", State.OK, f"{adapter}, 10 bytes"),
        (f"folder {adapter.parent}", State.OK, "1 folders"),
    ]


def test_adapter_is_wrong_when_its_folder_is_none(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    (adapter.parent / "empty").mkdir()
    flags = (f"--adapter=a={adapter},b={adapter.parent / 'empty'}", "--adapters-dir=/no/such")
    names, states, texts = zip(*found(*flags), strict=True)
    assert names == ("adapter a", "adapter b", "folder /no/such")
    assert set(states) == {State.WRONG}
    assert "which can run any code when it is read" in texts[0]
    assert "has no adapter_config.json" in texts[1]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("a=/a\na=/b\n", "the name 'a' is given twice"),
        ("a\n", "'a' is invalid; allowed: NAME=DIR"),
        ("a@b=/a\n", "has an @"),
    ],
)
def test_adapters_are_wrong_when_their_file_is(tmp_path: Path, lines: str, problem: str) -> None:
    file = tmp_path / "adapters"
    file.write_text(lines)
    [(name, state, text)] = found(f"--adapters-file={file}")
    assert (name, state) == ("adapters", State.WRONG)
    assert text.startswith(f"{file}: ")
    assert problem in text


def test_adapters_are_wrong_when_there_is_no_such_file() -> None:
    [(_, state, text)] = found("--adapters-file=/no/such")
    assert (state, text.partition(": ")[0]) == (State.WRONG, "/no/such cannot be read")


def test_serving_is_refused_when_an_adapter_is_none(adapter: Path) -> None:
    def check(*flags: str) -> None:
        check_before_serving(options.parse("serve", flags, {}))

    check()
    check(f"--adapter=a={adapter}")
    with pytest.raises(CannotServe, match=r"adapters: .*/none is no folder"):
        check(f"--adapter=a={adapter}", f"--adapter=b={adapter.parent / 'none'}")
    with pytest.raises(CannotServe, match="--max-adapters 0"):
        check(f"--adapters-dir={adapter.parent}", "--max-adapters=0")
