"""The examples of the client run, against a real scheduler with a fake executor."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.processes.fake_service import fake_service
from tests.support.processes.gateway import text_executor

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "clients" / "examples").glob("*.py"))


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_examples_say_what_they_promise_when_they_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: dict[str, list[str]] = {}
    async with fake_service(text_executor(tmp_path), queue_policy="fair") as service:
        for path in EXAMPLES:
            await asyncio.to_thread(load(path).main, service.scheduler.address)
            said[path.stem] = capsys.readouterr().out.splitlines()
        await service.wait_idle()

    assert said["one_call"][-1].endswith(" tokens")
    assert said["streaming"][-1] in ("[length]", "[stop]")
    assert said["resume"][0].startswith("True ")
    assert [line.split()[0] for line in said["several"]] == ["0", "1", "2"]
    assert [line.split()[0] for line in said["map_prompts"]] == list(map(str, range(20)))
    assert said["map_prompts"][7] == "7 failed: PROMPT_TOO_LONG"
    assert sorted(said["tenants"]) == ["busy"] * 12 + ["quiet"]
    assert len(said["chat"]) >= 2
    assert said.keys() == {path.stem for path in EXAMPLES}
