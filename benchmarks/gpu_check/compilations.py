"""Kernels that Triton compiles, counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def counted() -> Iterator[list[str]]:
    """Inside, the name of each kernel that is compiled, or got from Triton's cache, is added."""
    compiled: list[str] = []
    with _told(compiled.append):
        yield compiled


def tell(compiled: Callable[[str], None]) -> None:
    """From now on `compiled` is told of each; for a whole process."""
    _runtime().jit_post_compile_hook = _hook(compiled)


@contextmanager
def _told(compiled: Callable[[str], None]) -> Iterator[None]:
    runtime = _runtime()
    before = runtime.jit_post_compile_hook
    runtime.jit_post_compile_hook = _hook(compiled)
    try:
        yield
    finally:
        runtime.jit_post_compile_hook = before


def _hook(compiled: Callable[[str], None]) -> Callable[..., None]:
    def tell_name(**facts: object) -> None:
        compiled(str(getattr(facts.get("fn"), "name", None) or facts.get("repr")))

    return tell_name


def _runtime() -> Any:  # noqa: ANN401
    import triton

    knobs: Any = triton.knobs
    return knobs.runtime
