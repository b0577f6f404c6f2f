"""Sources of flash-attn 3: an installed package, the kernels hub, or a library file.

Imports neither flash-attn nor Triton. A source only has to register operators with torch.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import torch

from splitserve_kernels.gpu.attention.flash_attention_3_op import (
    FlashAttention3Op,
    FlashAttention3Unusable,
)

INSTALLED, HUB = "installed", "hub"
# Modules of the repository's builds, by version; all use the same namespace.
_MODULES = ("flash_attn_3._C", "flash_attn_interface")
_NAMESPACE = "flash_attn_3"
_HUB_REPOSITORY, _HUB_VERSION = "kernels-community/flash-attn3", 1
# Hopper; builds for other GPUs are slower than Triton or missing.
_CAPABILITY = (9, 0)


class FlashAttention3Missing(Exception):
    """Reports that flash-attn 3 is missing or cannot be loaded.

    The message is one line for users.
    """


def load_flash_attention_3(source: str) -> FlashAttention3Op:
    """Loads the operators of `source`: INSTALLED, HUB (may download them), or a library's path.

    Raises FlashAttention3Missing.
    """
    try:
        if source == INSTALLED:
            namespace = _of_package()
        elif source == HUB:
            namespace = _of_hub()
        else:
            namespace = _of_file(Path(source))
        return FlashAttention3Op(namespace)
    except FlashAttention3Unusable as error:
        raise FlashAttention3Missing(f"flash-attn 3 ({source}): {error}") from error


def why_no_hopper() -> str | None:
    """Returns why the device cannot run flash-attn 3; None if it can."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.cuda.get_device_capability() != _CAPABILITY:
        return "flash-attn 3 is for compute capability 9.0"
    return None


def _of_package() -> Any:  # noqa: ANN401
    for name in _MODULES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        except (ImportError, OSError) as error:
            # Usually built for another torch version; the first line names the symbol.
            raise FlashAttention3Missing(
                f"flash-attn 3 cannot be imported: {_first_line(error)}"
            ) from error
        return getattr(torch.ops, _NAMESPACE)
    raise FlashAttention3Missing(
        f"flash-attn 3 is not installed: no module {' or '.join(_MODULES)}"
    )


def _of_hub() -> Any:  # noqa: ANN401
    try:
        get_kernel = importlib.import_module("kernels").get_kernel
    except (ImportError, AttributeError) as error:
        # Any folder of that name is importable as an empty module.
        raise FlashAttention3Missing(
            f"flash-attn 3 from the hub needs the package kernels: {_first_line(error)}"
        ) from error
    try:
        module = get_kernel(_HUB_REPOSITORY, version=_HUB_VERSION)
        # Each build has a namespace of its own, which this module holds.
        return importlib.import_module(f"{module.__name__}._ops").ops
    except Exception as error:  # hub, HTTP and file errors share no base class
        raise FlashAttention3Missing(
            f"{_HUB_REPOSITORY} is not to be had from the hub: {_first_line(error)}"
        ) from error


def _of_file(path: Path) -> Any:  # noqa: ANN401
    if not path.is_file():
        raise FlashAttention3Missing(f"flash-attn 3: there is no file {path}")
    registered = _registered_by(path.resolve())
    # A library loaded earlier registers nothing now; then its file or folder name gives the
    # namespace.
    for name in registered or (path.name.split(".")[0], path.parent.name, _NAMESPACE):
        if name.isidentifier() and hasattr(getattr(torch.ops, name), "fwd"):
            return getattr(torch.ops, name)
    raise FlashAttention3Missing(
        f"flash-attn 3: {path} registers no operator fwd; it registers operators as"
        f" {', '.join(registered) or 'nothing'}: not a build of flash-attn 3"
    )


@functools.cache
def _registered_by(path: Path) -> tuple[str, ...]:
    """Loads the library at `path` and returns the namespaces of the operators that it registers.

    Cached, since a library registers its operators only when a process loads it for the first time.
    Raises FlashAttention3Missing.
    """
    before = _namespaces()
    untyped: Any = torch.ops
    try:
        untyped.load_library(path)
    except (OSError, RuntimeError) as error:
        raise FlashAttention3Missing(
            f"flash-attn 3: {path} cannot be loaded: {_first_line(error)}"
        ) from error
    return tuple(sorted(_namespaces() - before))


def _namespaces() -> set[str]:
    """Returns the namespaces of all operators registered with torch."""
    names: list[str] = torch._C._dispatch_get_all_op_names()
    return {name.partition("::")[0] for name in names}


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
