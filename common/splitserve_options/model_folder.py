"""Check of `--model` by the names of files: a checkpoint, or something else.

The parent of executors checks before it starts one. Executors check before they read any file.
"""

from __future__ import annotations

import re
from pathlib import Path

from splitserve_common import parse_json

# Weights that `transformers` reads: one file, or parts with an index. The first kind found counts.
WEIGHT_FILES = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SERVED = (
    "a GGUF file, or a directory with config.json and model.safetensors (or its index) of a"
    " decoder-only model, as transformers saves it"
)
_GGUF = ".gguf"
# Number of a file of a set: `model-00001-of-00003.gguf`.
_PART = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
# Image encoders that llama.cpp keeps in a file of their own; text needs none.
_PROJECTOR = "mmproj"
_OTHER_FORMATS = {
    ".ggml": "GGML weights",
    ".onnx": "an ONNX export",
    ".engine": "a TensorRT engine",
    ".h5": "TensorFlow weights",
    ".msgpack": "Flax weights",
    ".tflite": "a TensorFlow Lite model",
    ".nemo": "a NeMo archive",
    ".distcp": "shards of a training run",
    ".mlpackage": "a Core ML model",
    ".xml": "an OpenVINO export",
}
_OTHER_KINDS = {
    "model_index.json": "a diffusers pipeline",
}
_ADAPTER = "adapter_config.json"
_FILE = "a file, not a directory"
_NUM_SHOWN = 3


class NoCheckpoint(Exception):
    """Error: the path or id names no checkpoint. The message is one line for people."""


def find_checkpoint(model: str) -> Path | None:
    """Returns the checkpoint: a directory, a GGUF file, or None for an id of the Hugging Face hub.

    Raises NoCheckpoint for any other text, and for a directory without the files of a checkpoint.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        check_folder(path)
        has_config = (path / "config.json").is_file()
        if has_config and _has_weights(path):
            return path
        return gguf_files(_gguf_models(path)[0])[0]
    if path.suffix == _GGUF and path.is_file():
        return gguf_files(path)[0]
    if path.exists():
        raise NoCheckpoint(f"{model}: {_not_served(_OTHER_FORMATS.get(path.suffix, _FILE))}")
    if path.suffix == _GGUF:
        raise NoCheckpoint(f"{model}: no such file")
    if not _HUB_ID.fullmatch(model) or model.startswith("."):
        raise NoCheckpoint(f"{model}: no such directory")
    return None


def gguf_files(path: Path) -> tuple[Path, ...]:
    """Returns all files of the GGUF model of which `path` is one, in order.

    Raises NoCheckpoint if some are missing.
    """
    part = _PART.match(path.name)
    if part is None:
        return (path,)
    count = int(part["count"])
    names = [f"{part['stem']}-{number + 1:05}-of-{count:05}{_GGUF}" for number in range(count)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise NoCheckpoint(
            f"{path.parent}: {len(missing)} of {count} files of a GGUF model are missing, the first"
            f" is {missing[0]}; supported: the whole set in one directory"
        )
    return tuple(path.parent / name for name in names)


def check_folder(directory: Path) -> None:
    """Raises NoCheckpoint, with the kind of contents, if `directory` is no checkpoint."""
    try:
        names = {path.name for path in directory.iterdir()}
    except OSError as error:
        raise NoCheckpoint(f"{directory}: not readable ({error.strerror})") from error
    check_special_kind(directory)
    for describe in (_other_format, _incomplete):
        what = describe(directory, names)
        if what is not None:
            raise NoCheckpoint(f"{directory}: {what}")


def check_special_kind(directory: Path) -> None:
    """Raises NoCheckpoint if a file shows that the directory is an adapter or another kind.

    Other files do not matter, and the weights may still be missing.
    """
    if (directory / _ADAPTER).exists():
        raise NoCheckpoint(f"{directory}: {_adapter(directory)}")
    for name, kind in _OTHER_KINDS.items():
        if (directory / name).exists():
            raise NoCheckpoint(f"{directory}: {_not_served(f'{kind} ({name})')}")


def _adapter(directory: Path) -> str:
    try:
        content = parse_json((directory / _ADAPTER).read_text(encoding="utf-8"))
        base, kind = content.get("base_model_name_or_path"), content.get("peft_type")
    except (OSError, ValueError, AttributeError):
        base = kind = None
    adapter = f"{kind or 'PEFT'} adapter of the model {base or 'that it does not name'}"
    adapter = " ".join(adapter.split())
    if _has_weights(directory):
        return (
            f"{adapter} ({_ADAPTER}) next to the weights of a model, not served together; "
            f"supported: the weights without {_ADAPTER}, if the adapter was merged into them"
        )
    return (
        f"{adapter} ({_ADAPTER}, no weights of a model), not served by itself; supported: that"
        " model, or a checkpoint into which the adapter was merged"
    )


def _other_format(directory: Path, names: set[str]) -> str | None:
    """Returns the format of the weights if `transformers` with PyTorch cannot read them."""
    if _has_weights(directory):
        return None
    if "params.json" in names and any(name.startswith("consolidated.") for name in names):
        return _not_served("weights in their publisher's format (params.json, consolidated.*)")
    if (directory / "onnx").is_dir():
        return _not_served("an ONNX export (onnx)")
    models = _gguf_models(directory)
    if len(models) > 1:
        shown = _some({path.name for path in models})
        return f"{len(models)} GGUF models ({shown}), not served; supported: one of these files"
    if not models and (encoders := [name for name in sorted(names) if _is_projector(name)]):
        return _not_served(f"an image encoder of llama.cpp without a model ({encoders[0]})")
    for name in sorted(names):
        kind = _OTHER_FORMATS.get(Path(name).suffix)
        if kind is not None:
            return _not_served(f"{kind} ({name})")
    return None


def _incomplete(directory: Path, names: set[str]) -> str | None:
    """Returns the missing parts of a checkpoint of `transformers`; None if it is complete."""
    has_config, has_weights = "config.json" in names, _has_weights(directory)
    if (has_config and has_weights) or _gguf_models(directory):
        return None
    missing = "config.json is missing" if not has_config else "no weights"
    if not names:
        return _not_served(f"{missing}: an empty directory")
    inner = _checkpoint_within(directory)
    if inner is not None:
        return f"{missing}; did you mean {inner}?"
    if has_config:
        missing += " (neither model.safetensors nor its index)"
    elif not has_weights and any(name.startswith("tokenizer") for name in names):
        missing += ": a tokenizer without a model"
    return _not_served(f"{missing}; found: {_some(names)}")


def _has_weights(directory: Path) -> bool:
    return any((directory / name).is_file() for kind in WEIGHT_FILES for name in kind)


def _gguf_models(directory: Path) -> list[Path]:
    """Returns the GGUF models in a directory; of a set of files, the first that exists."""
    found = (path for path in sorted(directory.glob(f"*{_GGUF}")) if path.is_file())
    models: dict[str, Path] = {}
    for path in found:
        if not _is_projector(path.name):
            part = _PART.match(path.name)
            models.setdefault(path.name if part is None else part["stem"], path)
    return list(models.values())


def _is_projector(name: str) -> bool:
    return name.endswith(_GGUF) and _PROJECTOR in name


def _checkpoint_within(directory: Path) -> Path | None:
    """Returns a checkpoint one or two levels below, which was probably meant."""
    for pattern in ("*/config.json", "snapshots/*/config.json"):
        for path in sorted(directory.glob(pattern)):
            if _has_weights(path.parent):
                return path.parent
    return None


def _some(names: set[str]) -> str:
    shown = sorted(names)[:_NUM_SHOWN]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _not_served(what: str) -> str:
    return f"{what}, not served; supported: {_SERVED}"
