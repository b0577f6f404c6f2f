"""Adapters in real processes: tokens are those of PEFT whatever happens to files and executors.

A gate holds the long requests of these tests in their middle.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from splitserve_adapters import CONFIG_NAME, WEIGHTS_NAME
from splitserve_client import (
    AdapterUnknown,
    AsyncClient,
    SamplingParams,
    SchedulingParams,
    SplitserveError,
    Tokens,
)
from tests.support.models.model_pair import generate_greedily, load_reference
from tests.support.models.peft_adapters import make_adapter
from tests.support.models.tiny_models import make_tiny_model
from tests.support.processes.gate import GATE, GATED_EXECUTOR, GATED_SCHEDULER, Gate
from tests.support.processes.patience import PATIENT
from tests.support.processes.processes import Processes

ADAPTERS = tuple("abcdef")
PROMPT = [5, 17, 42, 9, 71, 23, 8, 30, 11]
# The gate holds sequences of more than HELD_AT tokens.
NUM_SHORT, HELD_AT, NUM_LONG = 12, 16, 80


class AdaptedProcesses(Processes):
    """A scheduler with a folder of adapters, and executors with two adapter slots."""

    executor_module = GATED_EXECUTOR

    def __init__(self, model: Path, adapters: Path, gate: Gate) -> None:
        super().__init__(model)
        self.adapters = adapters
        self.gate = gate
        self.start_scheduler("--adapters-dir", str(adapters), *GATED_SCHEDULER)

    def start_executor(self, *options: str, address: str = "") -> str:
        return super().start_executor(
            *("--dtype", "float32", "--threads", "1", "--max-adapters", "2"),
            *options,
            address=address,
        )

    async def busy_executor(self) -> str:
        """Waits for an executor that runs a request; returns its address."""
        executors = await self.wait_until(lambda found: any(e.num_running_requests for e in found))
        return max(executors, key=lambda each: each.num_running_requests).address


class Oracle:
    """Tokens of PEFT."""

    def __init__(self, model: Path, adapters: Path) -> None:
        """Saves ADAPTERS in `adapters`."""
        self._models = {"": load_reference(model)}
        for seed, name in enumerate(ADAPTERS):
            self._models[name] = make_adapter(
                model, adapters / name, seed, r=4, target_modules="all-linear"
            )
        self._answers: dict[tuple[str, int], list[int]] = {}

    def __call__(self, adapter: str, num_tokens: int = NUM_SHORT) -> list[int]:
        key = adapter, num_tokens
        if key not in self._answers:
            self._answers[key] = generate_greedily(self._models[adapter], PROMPT, num_tokens)
        return self._answers[key]


@dataclass(frozen=True, slots=True)
class Stack:
    """Running processes, and what they must answer."""

    processes: AdaptedProcesses
    expected: Oracle

    def copy(self, adapter: str, name: str) -> Path:
        """Copies an adapter under another name; returns its folder."""
        folder = self.processes.adapters / name
        shutil.copytree(self.processes.adapters / adapter, folder)
        return folder


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("stack")
    model, adapters = make_tiny_model("llama", directory / "model"), directory / "adapters"
    adapters.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(directory / "gate")
        patch.setenv(GATE, str(gate.path))
        running = AdaptedProcesses(model, adapters, gate)
        try:
            running.start_executor()
            yield Stack(running, Oracle(model, adapters))
        finally:
            running.kill_all()


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncClient]:
    """Client of one executor that nobody holds."""
    stack.processes.gate.release()
    await stack.processes.run_executors(1)
    async with AsyncClient(stack.processes.address, PATIENT) as opened:
        yield opened


async def ask(client: AsyncClient, adapter: str) -> list[int]:
    """Returns the tokens of a short request."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_SHORT, ignore_eos=True)
    scheduling = SchedulingParams(adapter=adapter)
    return list((await client.complete(PROMPT, params, scheduling=scheduling)).token_ids)


class Stream:
    """A long request, read as the test likes."""

    def __init__(self, client: AsyncClient, adapter: str) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_LONG, ignore_eos=True)
        scheduling = SchedulingParams(adapter=adapter)
        self._events = client.generate(PROMPT, params, scheduling=scheduling)
        self._tokens: list[int] = []

    async def begin(self) -> None:
        """Waits for the first tokens."""
        event = await anext(self._events)
        assert isinstance(event, Tokens)
        self._tokens += event.token_ids

    async def end(self) -> list[int]:
        """Returns all tokens."""
        async for event in self._events:
            if isinstance(event, Tokens):
                self._tokens += event.token_ids
        return self._tokens


async def held_stream(stack: Stack, client: AsyncClient, adapter: str) -> Stream:
    """Returns a stream that has begun, and does not end before the gate is released."""
    stack.processes.gate.hold(HELD_AT)
    stream = Stream(client, adapter)
    await stream.begin()
    return stream


async def test_tokens_equal_those_of_peft_when_adapters_are_more_than_slots(
    stack: Stack, client: AsyncClient
) -> None:
    expected = {name: stack.expected(name) for name in ("", *ADAPTERS)}
    assert len(set(map(tuple, expected.values()))) == len(expected)
    together = await asyncio.gather(*(ask(client, name) for name in expected))
    assert together == list(expected.values())
    for name in (*ADAPTERS, *reversed(ADAPTERS)):
        assert await ask(client, name) == expected[name]


async def test_stream_keeps_its_adapter_when_its_executor_is_killed(
    stack: Stack, client: AsyncClient
) -> None:
    running = stack.processes
    await running.run_executors(2)
    stream = await held_stream(stack, client, "a")
    running.kill_executor(await running.busy_executor())
    running.gate.release()
    assert await stream.end() == stack.expected("a", NUM_LONG)


async def test_new_executor_gets_files_that_are_gone_from_the_scheduler(
    stack: Stack, client: AsyncClient
) -> None:
    running = stack.processes
    folder = stack.copy("b", "removed")
    stream = await held_stream(stack, client, "removed")
    shutil.rmtree(folder)
    running.kill_executor(await running.busy_executor())
    running.gate.release()
    await running.run_executors(1)
    assert await stream.end() == stack.expected("b", NUM_LONG)
    with pytest.raises(AdapterUnknown):
        await ask(client, "removed")


async def test_stream_keeps_its_weights_when_new_ones_replace_them(
    stack: Stack, client: AsyncClient
) -> None:
    folder = stack.copy("c", "changing")
    stream = await held_stream(stack, client, "changing")
    _replace_weights(folder, folder.with_name("d"))
    later = asyncio.create_task(ask(client, "changing"))
    await stack.processes.wait_known(2)
    stack.processes.gate.release()
    assert await stream.end() == stack.expected("c", NUM_LONG)
    assert await later == stack.expected("d")


def _replace_weights(folder: Path, other: Path) -> None:
    """Gives an adapter the file of another one by a rename."""
    new = folder / "new"
    shutil.copy(other / WEIGHTS_NAME, new)
    new.rename(folder / WEIGHTS_NAME)


def _weights(change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    """Returns what changes the first tensor of an adapter."""

    def spoil(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS_NAME)
        name = min(tensors)
        save_file(tensors | {name: change(tensors[name]).contiguous()}, folder / WEIGHTS_NAME)

    return spoil


def _truncate(folder: Path) -> None:
    file = folder / WEIGHTS_NAME
    os.truncate(file, file.stat().st_size // 2)


def _long_header(folder: Path) -> None:
    (folder / WEIGHTS_NAME).write_bytes(b"\xff" * 7 + b"\x7f{}")


def _large_config(folder: Path) -> None:
    config = folder / CONFIG_NAME
    config.write_text(config.read_text() + " " * 2**21)


def _deep_config(folder: Path) -> None:
    (folder / CONFIG_NAME).write_text("[" * 2**19)


def _huge_rank(folder: Path) -> None:
    config: dict[str, Any] = json.loads((folder / CONFIG_NAME).read_text())
    (folder / CONFIG_NAME).write_text(json.dumps(config | {"r": 2**70}))


def _file_outside(folder: Path) -> None:
    file = folder / WEIGHTS_NAME
    file.rename(folder.parent.parent / "outside")
    file.symlink_to(folder.parent.parent / "outside")


def _folder_outside(folder: Path) -> None:
    folder.rename(folder.parent.parent / "folder_outside")
    folder.symlink_to(folder.parent.parent / "folder_outside")


def _pipe(folder: Path) -> None:
    (folder / WEIGHTS_NAME).unlink()
    os.mkfifo(folder / WEIGHTS_NAME)


# What spoils an adapter, and words of the error.
HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "nan": (_weights(lambda tensor: tensor * torch.nan), "finite"),
    "shape": (_weights(lambda tensor: tensor[:, :-1]), "shape"),
    "truncated": (_truncate, "truncated or corrupt"),
    "long_header": (_long_header, "truncated or corrupt"),
    "large_config": (_large_config, "allowed: at most"),
    "deep_config": (_deep_config, "is no JSON"),
    "huge_rank": (_huge_rank, "r is"),
    "file_outside": (_file_outside, "is a link that leaves"),
    "folder_outside": (_folder_outside, "is a link that leaves"),
    "pipe": (_pipe, "is no ordinary file"),
}


async def test_hostile_adapters_are_refused_by_reason_while_others_go_on(
    stack: Stack, client: AsyncClient
) -> None:
    for name, (spoil, _) in HOSTILE.items():
        spoil(stack.copy("e", name))
    stream = await held_stream(stack, client, "f")

    asking = asyncio.gather(*(ask(client, name) for name in HOSTILE), return_exceptions=True)
    stack.processes.gate.release()
    answers = await asking

    for (name, (_, words)), answer in zip(HOSTILE.items(), answers, strict=True):
        assert isinstance(answer, SplitserveError), (name, answer)
        assert (answer.reason, words in str(answer)) == ("ADAPTER_INVALID", True), (name, answer)
    assert await stream.end() == stack.expected("f", NUM_LONG)
    assert await ask(client, "e") == stack.expected("e")
    assert stack.processes.are_alive()


async def test_hostile_adapters_are_refused_when_an_operator_registers_them(
    client: AsyncClient, stack: Stack, tmp_path: Path
) -> None:
    # Links may leave a folder that an operator names.
    for name in HOSTILE.keys() - {"file_outside", "folder_outside"}:
        spoil, words = HOSTILE[name]
        folder = tmp_path / name
        shutil.copytree(stack.processes.adapters / "e", folder)
        spoil(folder)
        with pytest.raises(SplitserveError) as failed:
            await client.load_adapter("registered", str(folder))
        assert (failed.value.reason, words in str(failed.value)) == ("ADAPTER_INVALID", True), name
    with pytest.raises(AdapterUnknown):
        await ask(client, "registered")
