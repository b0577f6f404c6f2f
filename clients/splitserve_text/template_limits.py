"""Limits of a chat template: CPU time, and the size of all values that it creates.

A template is a program from a model's files that processes data of clients. It runs in this
process, where a call of C code cannot be interrupted. So the time is checked between the steps of a
template, and the size of a result is bounded before the result is made. Each result is charged by
its size in bytes, and charges are never refunded: a template cannot hold more than the limit.
"""

from __future__ import annotations

import itertools
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar

import jinja2.filters

TEMPLATE_FILE = "<template>"
# Each line of these files is traced; in other files only calls are.
_WATCHED_FILES = frozenset((TEMPLATE_FILE, jinja2.filters.__file__))
_MAX_INT_BITS = 4096
# Bytes that the budget keeps per list, tuple or dictionary; size of a small Jinja object.
_VALUE_BYTES = 256
_OBJECT_BYTES = 512
# A short text and its place in a list.
_PART_BYTES = 64
_LINE_ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
# Events per clock check: reading the thread's clock costs more than a line of a template.
_CLOCK_EVERY = 16
# Format fields with a large width (a size to be made), or with a computed one.
_WIDE_FIELD = re.compile(
    r"%[^a-zA-Z%]*(\d{4}|\*) | %\(.*\)[^a-zA-Z%]*(\d{4}|\*) | \{[^{}]*:[^{}]*(\d{4}|\{)",
    re.DOTALL | re.VERBOSE,
)


T = TypeVar("T")


class TemplateLimitExceeded(BaseException):
    """Reports that a template exceeded a limit.

    Not an Exception, so that no template can catch it.
    """


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Limits of rendering one template.

    `cpu_s`: CPU seconds of the rendering thread. `num_chars`: characters of any one text or list,
    written out. `total_num_chars`: of all values created, in one-byte characters; wider characters
    and lists count by their size in bytes. `clock`: returns the CPU seconds of the thread.
    """

    cpu_s: float = 2.0
    num_chars: int = 8_000_000
    total_num_chars: int = 256_000_000
    clock: Callable[[], float] = field(default=time.thread_time)


class RenderBudget:
    """Remaining budget of one template while a thread renders it."""

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._end = limits.clock() + limits.cpu_s
        self._num_bytes_left = limits.total_num_chars
        # Size by id of each list and dictionary, which templates cannot change. Values are stored
        # to keep their ids valid.
        self._sizes: dict[int, tuple[object, int]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Checks the time at calls and template lines within the context.

        Raises TemplateLimitExceeded.
        """
        clock, end = self._limits.clock, self._end
        num_events = 0

        def trace(frame: FrameType, event: str, argument: object) -> Any:  # noqa: ANN401
            nonlocal num_events
            num_events += 1
            if num_events % _CLOCK_EVERY == 0 and clock() > end:
                raise TemplateLimitExceeded(f"it took more than {self._limits.cpu_s:g} s")
            return trace if frame.f_code.co_filename in _WATCHED_FILES else None

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(before)

    def check_num_chars(self, num_chars: float) -> None:
        """Checks that a text of this length may be made. Raises TemplateLimitExceeded."""
        if num_chars > self._limits.num_chars:
            raise TemplateLimitExceeded(
                f"it creates a text of more than {self._limits.num_chars} characters"
            )
        self.check_num_bytes(int(num_chars))

    def check_num_bytes(self, num_bytes: int) -> None:
        """Checks that so many bytes may be allocated, even temporarily.

        Raises TemplateLimitExceeded.
        """
        if num_bytes > self._num_bytes_left:
            raise TemplateLimitExceeded("it allocates too much memory")

    def check_value(self, value: object) -> None:
        """Checks that `value`, with all its items, may be written out.

        An item counts once for each occurrence, since nesting makes a small value a large text.
        Raises TemplateLimitExceeded.
        """
        self._size(value)

    def _size(self, value: object) -> int:
        """Returns the size of `value` in characters and items.

        Raises TemplateLimitExceeded and RecursionError.
        """
        if isinstance(value, str | bytes):
            return 1 + len(value)
        if isinstance(value, int):
            return 1 + value.bit_length() // 3
        if not isinstance(value, dict | list | tuple | set | frozenset):
            return 1
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        self._charge(sys.getsizeof(value) + _VALUE_BYTES)
        items: Iterable[object] = value
        if isinstance(value, dict):
            items = itertools.chain(value.keys(), value.values())
        size = 1
        for item in items:
            size += 1 + len(item) if type(item) is str else self._size(item)
            if size > self._limits.num_chars:
                raise TemplateLimitExceeded(
                    f"a value has more than {self._limits.num_chars} characters"
                )
        self._sizes[id(value)] = (value, size)
        return size

    def _charge(self, num_bytes: int) -> None:
        self.check_num_bytes(num_bytes)
        self._num_bytes_left -= num_bytes

    def charge(self, made: T) -> T:
        """Charges the size of a new value, including its texts, and returns it.

        Raises TemplateLimitExceeded.
        """
        if made is None or isinstance(made, bool | int | float):
            return made
        if isinstance(made, str | bytes):
            self._charge(sys.getsizeof(made))
        elif isinstance(made, list | tuple):
            texts = sum(sys.getsizeof(item) for item in made if isinstance(item, str | bytes))
            self._charge(sys.getsizeof(made) + texts)
        elif isinstance(made, dict):
            self._charge(sys.getsizeof(made))
        else:
            self._charge(_OBJECT_BYTES)
        return made

    def charge_each(self, made: Iterator[T]) -> Iterator[T]:
        """Returns an iterator that charges each item of `made`, as the template may keep it."""
        return map(self.charge, made)

    def collect(self, items: Iterable[object]) -> list[Any]:
        """Returns `items` as a list; checks its size while it grows.

        Raises TemplateLimitExceeded.
        """
        found: list[Any] = []
        num_chars = 0
        for item in items:
            num_chars += 1 + (len(item) if isinstance(item, str) else 0)
            self._charge(_PART_BYTES)
            self.charge(item)
            if num_chars > self._limits.num_chars:
                raise TemplateLimitExceeded(
                    f"it creates a list of more than {num_chars - 1} characters"
                )
            found.append(item)
        self.check_value(found)
        return found

    # -- operators and methods ---------------------------------------------------------------------

    def check_operation(self, operator: str, left: Any, right: Any) -> None:  # noqa: ANN401
        """Checks the cost of `left operator right` before it is computed.

        Raises TemplateLimitExceeded.
        """
        match operator:
            case "*":
                self._check_product(left, right)
            case "+" if isinstance(left, str) and isinstance(right, str):
                self.check_num_chars(len(left) + len(right))
            case "+" if isinstance(left, Sequence) and isinstance(right, Sequence):
                self.check_num_chars(self._size(left) + self._size(right))
            case "**" if isinstance(left, int) and isinstance(right, int):
                if left.bit_length() * abs(right) > _MAX_INT_BITS:
                    raise TemplateLimitExceeded("it creates a number with too many digits")
            case "%" if isinstance(left, str):
                self.check_format(left, right)

    def _check_product(self, left: Any, right: Any) -> None:  # noqa: ANN401
        if isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > _MAX_INT_BITS:
                raise TemplateLimitExceeded("it creates a number with too many digits")
            return
        for value, factor in ((left, right), (right, left)):
            if isinstance(factor, int) and isinstance(value, str | list | tuple):
                self.check_num_chars(max(factor, 0) * self._size(value))

    def check_format(self, pattern: str, values: object) -> None:
        """Checks formatting `values` with `pattern`, of `%` or `{}` kind, beforehand.

        Raises TemplateLimitExceeded.
        """
        if _WIDE_FIELD.search(pattern):
            raise TemplateLimitExceeded("it formats with widths that are too large")
        self.check_value(values)
        num_fields = pattern.count("%") + pattern.count("{")
        self.check_num_chars(len(pattern) + num_fields * (_written_len(values) + 1000))

    def check_split(self, text: str, name: str, separator: object) -> None:
        """Checks the cost of splitting `text` with the method `name` beforehand.

        Raises TemplateLimitExceeded.
        """
        if name == "splitlines":
            num_parts = 1 + sum(map(text.count, _LINE_ENDS))
        elif isinstance(separator, str) and separator:
            num_parts = 1 + text.count(separator)
        else:
            num_parts = 1 + len(text) // 2
        self.check_num_bytes(sys.getsizeof(text) + _PART_BYTES * num_parts)

    def check_replace(self, text: str, old: str, new: str) -> None:
        """Checks the cost of replacing `old` by `new` beforehand. Raises TemplateLimitExceeded."""
        self.check_num_chars(len(text) + text.count(old) * max(len(new) - len(old), 0))


def _written_len(value: object) -> int:
    """Returns an upper bound of `len(str(part))` for any part of a checked value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_written_len(key) + _written_len(item) + 4 for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(_written_len(item) + 4 for item in value)
    return 64


class CurrentBudget(threading.local):
    """Budget of the template that the current thread renders."""

    budget: RenderBudget | None = None

    def get(self) -> RenderBudget:
        """Returns the budget; asserts that there is one."""
        assert self.budget is not None, "templates are rendered within their budget"
        return self.budget
