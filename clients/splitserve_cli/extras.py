"""Extras of the package `splitserve`: modules that some processes need beyond a base install."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from types import MappingProxyType

# Modules by extra. `pyproject.toml` names the packages.
MODULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gateway": (
            *("fastapi", "uvicorn", "httptools", "llguidance", "jsonschema"),
            *("soundfile", "soxr", "python_multipart"),
            *(() if sys.platform == "win32" else ("uvloop",)),
        ),
        "executor": (
            *("torch", "transformers", "sentencepiece", "safetensors", "psutil", "regex", "tqdm"),
            "llguidance",
        ),
    }
)


def missing_modules(extra: str) -> str:
    """Returns the modules of `extra` that are not installed, as text.

    Empty if all are installed.
    """
    names = [name for name in MODULES[extra] if not _is_installed(name)]
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
