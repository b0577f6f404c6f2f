"""Checks of the LoRA adapters that the options of a scheduler name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from splitserve_adapters import AdapterFiles, AdapterInvalid, parse_adapters, read_adapters_file
from splitserve_cli.checks.finding import Finding, ok, wrong
from splitserve_options import Value

_NO_START = "the scheduler does not start"
_CORRECT = "give PEFT folders with adapter_config.json and adapter_model.safetensors, or GGUF files"


def check_adapters(values: Mapping[str, Value]) -> Iterator[Finding]:
    """Yields findings about the adapters of a scheduler. `values`: its options."""
    try:
        adapters = named_adapters(values)
    except AdapterInvalid as error:
        yield wrong("adapters", str(error), _NO_START, "correct it")
        return
    for name, path in adapters.items():
        try:
            found = f"{path}, {check_adapter(path)} bytes"
        except AdapterInvalid as error:
            yield wrong(f"adapter {name}", str(error), _NO_START, _CORRECT)
        else:
            yield ok(f"adapter {name}", found)
    folder = values.get("adapters_dir")
    if folder is not None:
        yield _check_folder(Path(str(folder)))


def named_adapters(values: Mapping[str, Value]) -> dict[str, Path]:
    """Returns the adapters of `--adapter` and `--adapters-file`. Raises AdapterInvalid."""
    text, file = values.get("adapter"), values.get("adapters_file")
    adapters = {} if text is None else parse_adapters(str(text).split(","))
    if file is not None:
        adapters |= read_adapters_file(Path(str(file)))
    return adapters


def check_adapter(path: Path) -> int:
    """Returns the size of an adapter in bytes. Raises AdapterInvalid if there is none at `path`."""
    with AdapterFiles.open(path) as files:
        files.config()
        return files.num_bytes


def _check_folder(folder: Path) -> Finding:
    if not folder.is_dir():
        return wrong(f"folder {folder}", "missing", _NO_START, "check --adapters-dir")
    num_folders = sum(each.is_dir() for each in folder.iterdir())
    return ok(f"folder {folder}", f"{num_folders} folders")
