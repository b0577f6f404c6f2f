"""Raises where the host would wait for a device to know a number, though all is on the CPU."""

# What torch dispatches is of any type.
# ruff: noqa: ANN401

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operations whose result, or whose shape, depends on numbers.
_READS_ON_HOST = (
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "masked_select",
    "unique",
    "equal",
)
# Of a number of the host, which torch copies to the device and waits for.
_ASSIGNMENTS = ("index_put", "index_put_")
_METHODS = ("cpu", "numpy", "tolist", "item", "__bool__", "__index__", "__int__", "__float__")


class WaitedForDevice(AssertionError):
    """Somebody asked for what the device had yet to find."""


class _NoReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: Any, _types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.name().removeprefix("aten::").split(".")[0]
        if name in _READS_ON_HOST or (name in _ASSIGNMENTS and args[2].dim() == 0):
            raise WaitedForDevice(func.name())
        return func(*args, **(kwargs or {}))


@contextmanager
def nobody_waits() -> Iterator[None]:
    """Inside, nobody reads a tensor on the host."""
    with ExitStack() as stack:
        for name in _METHODS:
            stack.enter_context(patch.object(Tensor, name, _refusing(name)))
        stack.enter_context(_NoReads())  # type: ignore[no-untyped-call]
        yield


def _refusing(name: str) -> Any:
    def method(self: Tensor, *_: object) -> Any:
        raise WaitedForDevice(f"Tensor.{name} of {tuple(self.shape)}")

    return method
