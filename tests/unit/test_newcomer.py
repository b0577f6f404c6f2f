"""What docs/newcomer.md shows is what the code does: one step of two requests.

`python -m tests.unit.test_newcomer` prints the blocks of the document.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from google.protobuf.message import Message

from scheduler_service.scheduler.values import Request, SamplingParams
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.driver import make_config
from tests.support.core.in_process import InProcessEngine
from tests.support.fakes.fake_runner import FakeRunner

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "newcomer.md"
CONFIG = make_config(block_size=4, num_device_blocks=16)
WIDTHS = {"seeds": "<i8", "samples": "u1", "row_statuses": "u1"}

Shown = dict[str, object]


def shown(message: Message) -> Shown:
    """A message with its columns as lists of numbers."""
    return {field.name: _shown(field.name, value) for field, value in message.ListFields()}


def _shown(name: str, value: object) -> object:
    if isinstance(value, bytes):
        return np.frombuffer(value, WIDTHS.get(name, "<i4")).tolist()
    if isinstance(value, Message):
        return shown(value)
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [shown(each) for each in value]
    return value


def one_step() -> tuple[Shown, Shown, Shown, Shown]:
    """Block tables before the step, its batch and result, and what clients got by it."""
    runner = FakeRunner(block_size=4, num_device_blocks=16, vocab_size=CONFIG.vocab_size)
    engine = InProcessEngine(CONFIG, runner, epoch=1, depth=1)
    prompt = [10, 11, 12, 13, 20, 21, 22]
    engine.add(Request.create("ann", prompt, SamplingParams(temperature=0.0), arrival=1, seed=1))
    engine.fill()
    prompt = [10, 11, 12, 13, 30, 31]
    engine.add(Request.create("bob", prompt, SamplingParams(max_tokens=5), arrival=2, seed=2))
    engine.depth = 2
    engine.fill()
    first, second = (pb.ScheduleBatch.FromString(message) for _, message in engine.in_flight)
    tables = {}
    for name, batch in (("ann", first), ("bob", second)):
        new_rows = shown(batch)["new_rows"]
        assert isinstance(new_rows, dict)
        tables[name] = {"row": new_rows["row_ids"][0], "block_table": new_rows["block_ids"]}
    engine.answer()
    results: list[pb.StepResult] = []
    before = {name: len(tokens[0]) for name, tokens in engine.delivered.items()}
    engine.answer(results.append)
    assert not runner.violations
    got = {name: tokens[0][before[name] :] for name, tokens in engine.delivered.items()}
    return dict(tables), shown(second), shown(results[0]), dict(got)


def test_document_shows_the_step_as_it_is() -> None:
    blocks = re.findall(r"```json\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)

    assert [json.loads(block) for block in blocks] == list(one_step())


if __name__ == "__main__":
    for part in one_step():
        sys.stdout.write(json.dumps(part) + "\n")
