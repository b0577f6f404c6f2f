from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from executor_service.backends import (
    OFF,
    TRIALS_VARIABLE,
    TrialCache,
    code_digest,
    cpu_digest,
    open_trial_cache,
    trial_key,
)
from splitserve_kernels.cpu.build import CACHE_VARIABLE
from splitserve_options import options

FACTS = {"name": "model", "layers": [[2, 16, 16]], "scaling": 0.1}
CPU = """processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC
cpu MHz\t\t: 2596.132
flags\t\t: fpu avx2 fma

processor\t: 1
"""


def test_trial_cache_returns_the_facts_that_it_was_given(tmp_path: Path) -> None:
    cache = TrialCache(tmp_path / "new")
    assert cache.read("a") is None
    cache.write("a", FACTS)
    assert TrialCache(tmp_path / "new").read("a") == FACTS
    assert cache.read("b") is None


@pytest.mark.parametrize("damage", ["cut off", "changed", "empty"])
def test_trial_cache_ignores_a_damaged_file_with_a_warning(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = TrialCache(tmp_path)
    cache.write("a", FACTS)
    path = next(tmp_path.iterdir())
    content = path.read_bytes()
    damaged = {"cut off": content[:-3], "changed": content.replace(b"16", b"17"), "empty": b""}
    path.write_bytes(damaged[damage])
    assert cache.read("a") is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert caplog.messages[0].startswith("trials_not_read file=a.json")
    cache.write("a", FACTS)
    assert cache.read("a") == FACTS


def test_trial_cache_serves_on_when_its_directory_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    TrialCache(tmp_path / "file" / "trials").write("a", FACTS)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert caplog.messages[0].startswith("trials_not_remembered reason=")


def test_trial_cache_forgets_the_oldest_when_there_are_many(tmp_path: Path) -> None:
    cache = TrialCache(tmp_path)
    for number in range(33):
        cache.write(str(number), FACTS)
        os.utime(tmp_path / f"{number}.json", (number, number))
    assert cache.read("0") is None
    assert all(cache.read(str(number)) == FACTS for number in range(1, 33))


def test_open_trial_cache_finds_the_directory_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert options.parse("executor", [], {TRIALS_VARIABLE: OFF})
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "kernels"))
    for value, expected in (
        (str(tmp_path), TrialCache(tmp_path)),
        ("", TrialCache(tmp_path / "kernels" / "trials")),
        (OFF, None),
    ):
        monkeypatch.setenv(TRIALS_VARIABLE, value)
        assert open_trial_cache() == expected
    monkeypatch.setenv(TRIALS_VARIABLE, "")
    for variable in (CACHE_VARIABLE, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pathlib.Path.home", _no_home)
    assert open_trial_cache() is None


def _no_home() -> Path:
    raise RuntimeError("no home")


def test_trial_key_differs_when_anything_that_a_trial_depends_on_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    config.write_text("{}")
    weights.write_bytes(b"abc")
    os.utime(weights, (1, 1))

    def key(digest: str = "digest", options: object = ("bfloat16", 1)) -> str:
        return trial_key(tmp_path, [weights], digest, options)

    keys = [key(), key("other"), key(options=("bfloat16", 2))]
    assert key() == keys[0]
    os.utime(weights, (2, 2))
    keys.append(key())
    weights.write_bytes(b"abcd")
    os.utime(weights, (2, 2))
    keys.append(key())
    config.write_text("{ }")
    keys.append(key())
    (tmp_path / "tokenizer.json").write_text("{}")
    keys.append(key())
    for digest in ("code_digest", "cpu_digest"):
        with monkeypatch.context() as patched:
            patched.setattr(f"executor_service.backends.trial_cache.{digest}", lambda: "other")
            keys.append(key())
    assert len(set(keys)) == len(keys) == 9
    assert key() == keys[6]


def test_code_digest_differs_when_a_source_file_does(tmp_path: Path) -> None:
    digests = {code_digest()}
    # Another folder each time: a process looks once.
    for number, text in enumerate(("a = 1", "a = 2", "a = 2")):
        root = tmp_path / str(number)
        (root / "native").mkdir(parents=True)
        (root / "native" / "gemm.h").write_text(text)
        (root / "native" / "gemm.o").write_text(str(number))
        digests.add(code_digest((root,)))
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("old", "new", "is_same"),
    [
        ("2596.132", "2595.000", True),
        ("AMD EPYC", "AMD EPYC 9R14", False),
        ("avx2 fma", "avx2", False),
        ("processor\t: 1\n", "", True),
    ],
)
def test_cpu_digest_distinguishes_processors(
    old: str, new: str, is_same: bool, tmp_path: Path
) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(CPU)
    before = cpu_digest(path)
    path.write_text(CPU.replace(old, new))
    assert (cpu_digest(path) == before) == is_same
    assert len(cpu_digest(tmp_path / "missing")) == 64
