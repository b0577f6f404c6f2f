"""A value that comes from elsewhere, and from time to time is a new one."""

from __future__ import annotations

from typing import Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Refreshed(Protocol[T_co]):
    """`value`: the last one of use; another object when it has changed."""

    @property
    def value(self) -> T_co: ...

    def refresh(self) -> bool:
        """Looks whether there is a new one; whether there was. Blocks, in any thread."""
        ...
