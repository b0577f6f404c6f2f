"""The registry of adapters: names, versions of files, and what requests keep."""

from __future__ import annotations

import json
import os
from hashlib import sha256
from pathlib import Path

import pytest

from scheduler_service.adapters import AdapterRegistry, AdapterUnknown
from splitserve_adapters import AdapterFiles
from splitserve_contract import DomainError


def write(folder: Path, weights: bytes = b"weights", base: str = "org/base") -> Path:
    """Writes the files of an adapter; the scheduler does not look into the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    replace(folder, weights)
    return folder


def replace(folder: Path, weights: bytes) -> None:
    """Replaces the weights as a careful program does."""
    new = folder / "new"
    new.write_bytes(weights)
    new.rename(folder / "adapter_model.safetensors")


def digest(folder: Path) -> str:
    """The digest of a folder, as executor.proto describes it."""
    names = ("adapter_config.json", "adapter_model.safetensors")
    lines = [f"{sha256((folder / n).read_bytes()).hexdigest()}  {n}\n" for n in names]
    return sha256("".join(lines).encode()).hexdigest()


async def reference(registry: AdapterRegistry, name: str) -> str:
    """The version of a request that comes now, and keeps nothing."""
    async with registry.looking(name):
        return registry.reference(name)


async def held(registry: AdapterRegistry, name: str) -> str:
    """The version of a request that was accepted now."""
    async with registry.looking(name):
        found = registry.reference(name)
        registry.hold(found)
    return found


async def files_of(registry: AdapterRegistry, digest: str) -> dict[str, bytes]:
    """What an executor gets."""
    files: dict[str, bytes] = {}
    async for name, data in registry.chunks(digest):
        files[name] = files.get(name, b"") + data
    return files


async def test_reference_is_name_and_digest(tmp_path: Path) -> None:
    folder = write(tmp_path / "sql")
    known = AdapterRegistry({"sql": folder})
    assert await reference(known, "sql") == f"sql@{digest(folder)[:16]}"
    (listed,) = await known.listed()
    assert (listed.name, listed.path, listed.base_model) == ("sql", folder, "org/base")
    assert listed.digest == digest(folder)


async def test_other_files_are_another_version(tmp_path: Path) -> None:
    folder = write(tmp_path / "sql")
    known = AdapterRegistry({"sql": folder})
    before = await reference(known, "sql")
    replace(folder, b"others")
    assert await reference(known, "sql") == f"sql@{digest(folder)[:16]}" != before


async def test_equal_files_elsewhere_are_the_same_version_and_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "sql")
    known = AdapterRegistry({"sql": folder})
    before = await reference(known, "sql")
    reads: list[AdapterFiles] = []
    digest_of_files = AdapterFiles.digest

    def counted(files: AdapterFiles) -> str:
        reads.append(files)
        return digest_of_files(files)

    monkeypatch.setattr(AdapterFiles, "digest", counted)
    folder.rename(tmp_path / "old")
    write(folder)
    for _ in range(3):
        assert await reference(known, "sql") == before
    assert len(reads) == 1


async def test_unknown_name_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    known = AdapterRegistry({f"n{number:02}": tmp_path / "x" for number in range(12)})
    with pytest.raises(AdapterUnknown, match=r"no adapter 'nope'; registered: n00, .*n09 and 2"):
        await reference(known, "nope")


async def test_request_keeps_its_files_when_they_are_replaced(tmp_path: Path) -> None:
    folder = write(tmp_path / "sql", b"old")
    known = AdapterRegistry({"sql": folder})
    old = await held(known, "sql")
    replace(folder, b"new")
    new = await held(known, "sql")

    path, found, num_bytes = known.source(old) or (folder, "", 0)
    assert path == folder
    files = await files_of(known, found)
    assert files["adapter_model.safetensors"] == b"old"
    assert num_bytes == sum(map(len, files.values()))
    others = await files_of(known, digest(folder))
    assert others["adapter_model.safetensors"] == b"new"

    known.release(old)
    assert known.source(old) is None
    with pytest.raises(AdapterUnknown):
        await files_of(known, found)
    known.release(new)
    assert known.source(new) is None


async def test_request_keeps_its_files_when_the_adapter_is_removed(tmp_path: Path) -> None:
    folder = write(tmp_path / "sql")
    known = AdapterRegistry()
    await known.load("sql", folder, replace=False)
    kept = await held(known, "sql")
    known.unload("sql")
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    with pytest.raises(AdapterUnknown):
        await reference(known, "sql")
    assert known.source(kept) is not None
    known.release(kept)
    assert known.source(kept) is None


async def test_files_are_open_only_while_requests_have_them(tmp_path: Path) -> None:
    known = AdapterRegistry({"sql": write(tmp_path / "sql")})

    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = num_open()
    await reference(known, "sql")
    assert num_open() == before
    kept = [await held(known, "sql") for _ in range(2)]
    assert num_open() == before + 2
    for each in kept:
        known.release(each)
    assert num_open() == before


async def test_folders_of_the_directory_are_found_when_a_request_names_them(tmp_path: Path) -> None:
    known = AdapterRegistry(directory=tmp_path)
    folder = write(tmp_path / "late")
    assert await reference(known, "late") == f"late@{digest(folder)[:16]}"
    assert [each.name for each in await known.listed()] == ["late"]


@pytest.mark.parametrize("name", ["..", ".", "../out", "in/side", "a\\b", "", "x\n", "a@b", "no"])
async def test_no_name_leaves_the_directory(tmp_path: Path, name: str) -> None:
    write(tmp_path / "out")
    directory = tmp_path / "adapters"
    write(directory / "in" / "side")
    with pytest.raises(DomainError) as refused:
        await reference(AdapterRegistry(directory=directory), name)
    assert refused.value.reason in {"ADAPTER_UNKNOWN", "ADAPTER_INVALID"}


async def test_link_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside")
    folder = write(tmp_path / "adapters" / "sql")
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    with pytest.raises(DomainError, match="is a link that leaves"):
        await reference(AdapterRegistry(directory=tmp_path / "adapters"), "sql")
    # The operator's own choice may be a link, as folders of the hub's cache are.
    assert await reference(AdapterRegistry({"sql": folder}), "sql")


async def test_folder_that_is_no_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    known = AdapterRegistry({"empty": tmp_path / "empty", "gone": tmp_path / "gone"})
    with pytest.raises(DomainError, match=r"has no adapter_config.json") as refused:
        await reference(known, "empty")
    assert refused.value.reason == "ADAPTER_INVALID"
    with pytest.raises(DomainError, match="is no folder"):
        await reference(known, "gone")


@pytest.mark.parametrize(
    ("name", "expected"), [("adapter_config.json", "at most 1048576"), ("pipe", "no ordinary file")]
)
async def test_hostile_files_are_refused(tmp_path: Path, name: str, expected: str) -> None:
    folder = write(tmp_path / "sql")
    if name == "pipe":
        (folder / "adapter_model.safetensors").unlink()
        os.mkfifo(folder / "adapter_model.safetensors")
    else:
        with (folder / name).open("wb") as file:
            file.truncate(2**31)
    with pytest.raises(DomainError, match=expected):
        await reference(AdapterRegistry({"sql": folder}), "sql")


async def test_load_refuses_another_folder_of_a_name_unless_it_replaces(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", b"1"), write(tmp_path / "b", b"2")
    known = AdapterRegistry()
    await known.load("sql", first, replace=False)
    await known.load("sql", first, replace=False)
    with pytest.raises(DomainError) as refused:
        await known.load("sql", second, replace=False)
    assert refused.value.reason == "ADAPTER_EXISTS"
    await known.load("sql", second, replace=True)
    assert await reference(known, "sql") == f"sql@{digest(second)[:16]}"


async def test_file_of_adapters_is_followed(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", b"1"), write(tmp_path / "b", b"2")
    file = tmp_path / "adapters.txt"
    file.write_text(f"# ours\n\nsql={first}\nchat={first}\n")
    known = AdapterRegistry(file=file)
    await known.read_file()
    assert [each.name for each in await known.listed()] == ["chat", "sql"]

    file.write_text(f"sql={second}\n")
    await known.read_file()
    assert [each.name for each in await known.listed()] == ["sql"]
    assert await reference(known, "sql") == f"sql@{digest(second)[:16]}"

    file.write_text("no line of this form")
    await known.read_file()
    assert [each.name for each in await known.listed()] == ["sql"]
