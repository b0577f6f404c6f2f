"""LoadAdapter at the executor: where the files come from, and what is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from hashlib import sha256
from pathlib import Path

import pytest

from executor_service.service import AdapterLoading
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve_adapters import AdapterInvalid, digest_of
from splitserve_contract import DomainError

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": 3 * b"weights"}


def source_of(
    files: Mapping[str, bytes], path: Path = Path("/nowhere"), name: str = "sql@1"
) -> pb.AdapterSource:
    """What a scheduler says of these files."""
    return pb.AdapterSource(
        name=name,
        digest=digest_of({name: sha256(data).hexdigest() for name, data in files.items()}),
        path=str(path),
        num_bytes=sum(map(len, files.values())),
    )


class Store:
    """Remembers what was loaded; refuses files that say so."""

    def __init__(self, max_num: int = 2) -> None:
        self.loaded: dict[str, Mapping[str, bytes]] = {}
        self.num_loads = 0
        self._max_num = max_num

    def has(self, name: str) -> bool:
        return name in self.loaded

    def keep(self, names: Collection[str]) -> None:
        self.loaded = {name: files for name, files in self.loaded.items() if name in names}

    def check_room(self, num_bytes: int) -> None:
        if len(self.loaded) == self._max_num:
            raise DomainError("ADAPTERS_FULL", f"no room for {num_bytes} bytes")

    def load(self, name: str, files: Mapping[str, bytes]) -> None:
        if b"bad" in files.values():
            raise AdapterInvalid("adapter_model.safetensors: lora_A is NaN")
        self.num_loads += 1
        self.loaded[name] = files


class Sender:
    """A scheduler that sends `files` in small pieces."""

    def __init__(self, files: Mapping[str, bytes] = FILES) -> None:
        self.files = files
        self.asked: list[str] = []
        self.was_asked = asyncio.Event()
        self.may_send = asyncio.Event()
        self.may_send.set()

    async def __call__(self, digest: str) -> AsyncIterator[tuple[str, bytes]]:
        self.asked.append(digest)
        self.was_asked.set()
        await self.may_send.wait()
        for name, data in self.files.items():
            for start in range(0, len(data), 5):
                yield name, data[start : start + 5]


async def test_files_come_from_the_disk_if_they_are_there(tmp_path: Path) -> None:
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    store, sender = Store(), Sender()
    await AdapterLoading(store, sender).load(source_of(FILES, tmp_path), [])
    assert store.loaded == {"sql@1": FILES}
    assert sender.asked == []


@pytest.mark.parametrize("on_disk", [{}, {"adapter_config.json": b"[]"}])
async def test_files_come_from_the_scheduler_if_the_disk_has_none_or_others(
    tmp_path: Path, on_disk: dict[str, bytes]
) -> None:
    for name, data in (FILES | on_disk if on_disk else {}).items():
        (tmp_path / name).write_bytes(data)
    store, sender = Store(), Sender()
    source = source_of(FILES, tmp_path)
    await AdapterLoading(store, sender).load(source, [])
    assert store.loaded == {"sql@1": FILES}
    assert sender.asked == [source.digest]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (FILES | {"adapter_config.json": b"[]"}, "have changed"),
        (FILES | {"more": b"12345"}, "more than"),
        ({"../adapter_config.json": b"{}"}, "relative path"),
        ({"a/b": b"{}"}, "has a path"),
        ({f"f{number}": b"1" for number in range(9)}, "8 files"),
    ],
)
async def test_wrong_files_of_the_scheduler_are_refused(
    sent: dict[str, bytes], expected: str
) -> None:
    store = Store()
    with pytest.raises(DomainError, match=expected) as refused:
        await AdapterLoading(store, Sender(sent)).load(source_of(FILES), [])
    assert refused.value.reason == "ADAPTER_INVALID"
    assert store.loaded == {}


async def test_only_kept_adapters_stay() -> None:
    store = Store()
    loading = AdapterLoading(store, Sender())
    for name in ("a@1", "b@1"):
        await loading.load(source_of(FILES, name=name), ["a@1"])
    with pytest.raises(DomainError) as refused:
        await loading.load(source_of(FILES, name="c@1"), ["a@1", "b@1"])
    assert refused.value.reason == "ADAPTERS_FULL"
    await loading.load(source_of(FILES, name="c@1"), ["b@1"])
    assert sorted(store.loaded) == ["b@1", "c@1"]


async def test_loaded_adapter_is_not_loaded_again() -> None:
    store = Store()
    loading = AdapterLoading(store, Sender())
    for _ in range(2):
        await loading.load(source_of(FILES), [])
    assert store.num_loads == 1


async def test_cancelled_call_does_not_end_the_loading() -> None:
    store, sender = Store(), Sender()
    sender.may_send.clear()
    loading = AdapterLoading(store, sender)
    first = asyncio.create_task(loading.load(source_of(FILES), []))
    await sender.was_asked.wait()
    first.cancel()
    second = asyncio.create_task(loading.load(source_of(FILES), []))
    sender.may_send.set()
    await second
    assert (store.num_loads, len(sender.asked)) == (1, 1)
    assert first.cancelled()


async def test_bad_adapter_is_refused_with_its_reason_and_may_be_tried_again() -> None:
    bad = FILES | {"adapter_model.safetensors": b"bad"}
    store, sender = Store(), Sender(bad)
    loading = AdapterLoading(store, sender)
    for _ in range(2):
        with pytest.raises(DomainError, match="lora_A is NaN"):
            await loading.load(source_of(bad), [])
    assert store.loaded == {}
    await AdapterLoading(store, Sender()).load(source_of(FILES), [])
    assert sorted(store.loaded) == ["sql@1"]
