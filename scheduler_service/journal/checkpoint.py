"""A core as bytes, and back, without running what the bytes say.

A pickle can call whatever its reader finds by name. This reader finds what the core defines, plain
containers, and the functions at the end of this file. The core does no I/O, which is checked, and
nothing else can be reached from any of these: in particular there is no `getattr`, so no bound
methods. What strange bytes can do is take time and memory.
"""

from __future__ import annotations

import ast
import copyreg
import hashlib
import importlib
import io
import pickle
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import FunctionType, MappingProxyType, MethodType
from typing import Any

import numpy as np

import scheduler_service.core
from scheduler_service.core.blocks.block_manager import BlockManager
from scheduler_service.core.row_columns import RowColumns
from scheduler_service.core.scheduler import Scheduler

_CORE = scheduler_service.core.__name__
_PROTOCOL = 5
_NUMBERS = frozenset({"<i4", "<i8", "<u4", "<u8", "<f4", "<f8", "|b1", "|u1"})
# Of a row, these are as long as a sequence may become, and in use up to what the second counts.
_LONG_COLUMNS = ("token_ids", "block_tables")


class CheckpointUnusable(Exception):
    """The bytes are not the state of a core, or not that of a core of this software version."""


def dump_core(core: Scheduler) -> bytes:
    """The state of a core. Raises PicklingError if it has something that cannot be restored."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, _PROTOCOL)
    pickler.dispatch_table = {**copyreg.dispatch_table, **_REDUCERS}
    pickler.dump(core)
    return buffer.getvalue()


def load_core(data: bytes) -> Scheduler:
    """A core in the state that was dumped. Raises CheckpointUnusable."""
    try:
        core = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # whatever strange bytes lead to
        raise CheckpointUnusable(f"{type(error).__name__}: {error}") from error
    if not isinstance(core, Scheduler):
        raise CheckpointUnusable(f"it holds a {type(core).__name__}")
    return core


# -- what a core consists of -------------------------------------------------------------------


@cache
def core_structure() -> str:
    """Fingerprint of what the classes of this build's core consist of, in hexadecimal.

    It covers their names, bases, fields with types, members of enums, and the attributes that
    methods set, with the values that `__init__` gives them. A checkpoint is read by builds with
    the same fingerprint; what methods decide may differ, which is what a replay finds out.
    """
    digest = hashlib.sha256()
    root = Path(scheduler_service.core.__path__[0])
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode())
        for line in class_structures(path.read_text("utf-8")):
            digest.update(f"{line}\n".encode())
    return digest.hexdigest()[:16]


def check_structure(recorded: str) -> None:
    """Raises CheckpointUnusable unless a checkpoint is of a core like that of this build."""
    if recorded != core_structure():
        raise CheckpointUnusable(
            f"a checkpoint of another build: the structure of its core is {recorded or 'unknown'}, "
            f"this software reads {core_structure()}"
        )


def class_structures(source: str) -> Iterator[str]:
    """Lines that change whenever instances of the classes of a module consist of something else."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            yield f"class {node.name} {[ast.unparse(base) for base in node.bases]}"
            yield from (
                f"{node.name} {ast.unparse(part)}"
                for part in node.body
                if isinstance(part, ast.Assign | ast.AnnAssign)
            )
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    yield from sorted(set(_attributes_set(method)))


def _attributes_set(method: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(method):
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [
            part.attr
            for target in targets
            for part in ast.walk(target)
            if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
        ]
        if names and method.name == "__init__":
            yield ast.unparse(node)
        else:
            yield from names


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, name: str) -> Any:  # noqa: ANN401
        """What a pickle may name. Raises UnpicklingError for all else."""
        admitted = _ADMITTED.get((module_name, name))
        if admitted is not None:
            return admitted
        is_core = module_name.startswith(f"{_CORE}.") and name.isidentifier()
        found = getattr(importlib.import_module(module_name), name, None) if is_core else None
        # Of that module itself, not something that it imports.
        if isinstance(found, type | FunctionType) and found.__module__ == module_name:
            return found
        raise pickle.UnpicklingError(f"{module_name}.{name} is not admitted")


# -- what pickles in its own way ---------------------------------------------------------------


def restore_array(dtype: str, shape: tuple[int, ...], data: bytes) -> np.ndarray[Any, Any]:
    """An array of numbers. Raises ValueError."""
    if dtype not in _NUMBERS:
        raise ValueError(f"an array of {dtype}")
    return np.frombuffer(data, dtype).reshape(shape).copy()


def restore_number(dtype: str, data: bytes) -> Any:  # noqa: ANN401
    """A single number of numpy's. Raises ValueError."""
    return restore_array(dtype, (1,), data)[0]


def restore_rows(
    columns: dict[str, Any], shapes: dict[str, tuple[int, int]], used: dict[str, list[Any]]
) -> RowColumns:
    """Rows whose long columns were cut."""
    rows = object.__new__(RowColumns)
    vars(rows).update(columns)
    for name in _LONG_COLUMNS:
        column = np.zeros(shapes[name], np.int32)
        for row_id, part in used[name]:
            column[row_id, : len(part)] = part
        setattr(rows, name, column)
    return rows


def _reduce_array(array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    if array.dtype.str not in _NUMBERS:
        raise pickle.PicklingError(f"an array of {array.dtype}")
    return restore_array, (array.dtype.str, array.shape, array.tobytes())


def _reduce_number(number: np.generic) -> tuple[Any, ...]:
    return restore_number, (number.dtype.str, number.tobytes())


def _reduce_rows(rows: RowColumns) -> tuple[Any, ...]:
    columns = {name: value for name, value in vars(rows).items() if name not in _LONG_COLUMNS}
    running = rows.order.tolist()
    used = {
        "token_ids": [(row_id, rows.known_tokens(row_id)) for row_id in running],
        "block_tables": [(row_id, rows.block_table(row_id)) for row_id in running],
    }
    shapes = {name: getattr(rows, name).shape for name in _LONG_COLUMNS}
    return restore_rows, (columns, shapes, used)


def restore_eviction(blocks: BlockManager) -> Callable[[int, bytes], None]:
    """What a pool of device blocks tells of those it reuses."""
    return blocks._demote


def _reduce_method(method: MethodType) -> tuple[Any, ...]:
    blocks = method.__self__
    if not isinstance(blocks, BlockManager) or method.__name__ != "_demote":
        raise pickle.PicklingError(f"a method {method.__qualname__}")
    return restore_eviction, (blocks,)


_REDUCERS: Mapping[type, Callable[[Any], tuple[Any, ...]]] = MappingProxyType(
    {
        np.ndarray: _reduce_array,
        **dict.fromkeys((np.int32, np.int64, np.bool_, np.float32, np.float64), _reduce_number),
        RowColumns: _reduce_rows,
        MethodType: _reduce_method,
    }
)
_FUNCTIONS = (restore_array, restore_number, restore_rows, restore_eviction)
_CONTAINERS = (set, frozenset, deque, OrderedDict, Counter, Fraction)
_ADMITTED: Mapping[tuple[str, str], Any] = MappingProxyType(
    {(found.__module__, found.__name__): found for found in (*_FUNCTIONS, *_CONTAINERS)}
)
