"""Checkpoints: the whole scheduler as bytes, and a safe reader of these bytes.

A plain pickle can call whatever its reader finds by name. This reader finds only classes and
functions of the pure packages, methods of their classes, plain containers, and the restoring
functions of this module. The pure packages do no I/O, which is checked, and nothing else can be
reached from any of these. Hostile bytes can only take time and memory.
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
from typing import Any, TypeVar

import numpy as np

import scheduler_service.scheduler
from scheduler_service.scheduler.engine import RowColumns

# Package with the classes of a scheduler.
_PURE = scheduler_service.scheduler
_PROTOCOL = 5
_NUMBERS = frozenset({"<i4", "<i8", "<u4", "<u8", "<f4", "<f8", "|b1", "|u1"})
# Columns of RowColumns as long as the longest sequence; only the parts in use are written.
_LONG_COLUMNS = ("token_ids", "block_tables")

_Value = TypeVar("_Value")


class CheckpointUnusable(Exception):
    """Error: the bytes are not the state of a scheduler, or come from another software version."""


def dump_state(value: object) -> bytes:
    """Returns the state of a scheduler or an engine as bytes.

    Raises PicklingError if the state contains a value that cannot be restored.
    """
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, _PROTOCOL)
    pickler.dispatch_table = {**copyreg.dispatch_table, **_REDUCERS}
    pickler.dump(value)
    return buffer.getvalue()


def load_state(data: bytes, kind: type[_Value]) -> _Value:
    """Returns a new object of class `kind` in the state that `dump_state` wrote.

    Raises CheckpointUnusable.
    """
    try:
        value = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # damaged bytes may raise anything
        raise CheckpointUnusable(f"{type(error).__name__}: {error}") from error
    if not isinstance(value, kind):
        raise CheckpointUnusable(f"contains a {type(value).__name__}; expected: {kind.__name__}")
    return value


# -- Structure of a scheduler ------------------------------------------------------------------


@cache
def scheduler_structure() -> str:
    """Fingerprint of the classes of this build's scheduler, in hexadecimal.

    The fingerprint covers their names, bases, fields with types, members of enums, and the
    attributes that methods set, with the values that `__init__` gives them. A checkpoint is read
    only by builds with the same fingerprint. The code of methods may differ: a replay finds
    differing decisions.
    """
    digest = hashlib.sha256()
    for name, path in _modules():
        digest.update(f"{name}\n".encode())
        for line in class_structures(path.read_text("utf-8")):
            digest.update(f"{line}\n".encode())
    return digest.hexdigest()[:16]


def _modules() -> Iterator[tuple[str, Path]]:
    """Yields the modules of the pure package, with names that do not depend on the folder."""
    assert _PURE.__file__ is not None
    folder = Path(_PURE.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        yield f"{_PURE.__name__}/{path.relative_to(folder).as_posix()}", path


def check_structure(recorded: str) -> None:
    """Raises CheckpointUnusable if `recorded` is not the structure of this build's scheduler."""
    if recorded != scheduler_structure():
        raise CheckpointUnusable(
            f"a checkpoint of another build: its scheduler structure is {recorded or 'unknown'}; "
            f"this software reads {scheduler_structure()}"
        )


def class_structures(source: str) -> Iterator[str]:
    """Yields lines that change whenever instances of the classes in `source` change contents."""
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
        """Returns the class or function that a pickle names.

        Raises UnpicklingError unless admitted.
        """
        admitted = _ADMITTED.get((module_name, name))
        if admitted is not None:
            return admitted
        is_pure = _is_pure(module_name) and name.isidentifier()
        found = getattr(importlib.import_module(module_name), name, None) if is_pure else None
        # Defined in that module, not imported by it.
        if isinstance(found, type | FunctionType) and found.__module__ == module_name:
            return found
        raise pickle.UnpicklingError(f"{module_name}.{name} is not allowed in a checkpoint")


def _is_pure(module_name: str) -> bool:
    package = ".".join(module_name.split(".")[:2])
    return package == _PURE.__name__


# -- Values with their own pickling ------------------------------------------------------------


def restore_array(dtype: str, shape: tuple[int, ...], data: bytes) -> np.ndarray[Any, Any]:
    """Returns an array of numbers. Raises ValueError for another dtype or a wrong shape."""
    if dtype not in _NUMBERS:
        raise ValueError(f"array dtype {dtype} is not allowed in a checkpoint")
    return np.frombuffer(data, dtype).reshape(shape).copy()


def restore_number(dtype: str, data: bytes) -> Any:  # noqa: ANN401
    """Returns a numpy scalar. Raises ValueError for a dtype that is no number."""
    return restore_array(dtype, (1,), data)[0]


def restore_rows(
    columns: dict[str, Any], shapes: dict[str, tuple[int, int]], used: dict[str, list[Any]]
) -> RowColumns:
    """Returns rows with their long columns filled up to `shapes`.

    `used`: for each long column, (row id, part in use).
    """
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
        raise pickle.PicklingError(f"array dtype {array.dtype} is not allowed in a checkpoint")
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


def restore_method(owner: Any, name: str) -> Callable[..., Any]:  # noqa: ANN401
    """Returns a bound method of an object of the pure packages. Raises ValueError for any other."""
    for kind in type(owner).__mro__:
        found = vars(kind).get(name)
        if found is not None:
            if isinstance(found, FunctionType) and _is_pure(found.__module__):
                return MethodType(found, owner)
            break
    raise ValueError(f"method {name} of {type(owner).__name__} is not allowed in a checkpoint")


def _reduce_method(method: MethodType) -> tuple[Any, ...]:
    return restore_method, (method.__self__, method.__name__)


_REDUCERS: Mapping[type, Callable[[Any], tuple[Any, ...]]] = MappingProxyType(
    {
        np.ndarray: _reduce_array,
        **dict.fromkeys((np.int32, np.int64, np.bool_, np.float32, np.float64), _reduce_number),
        RowColumns: _reduce_rows,
        MethodType: _reduce_method,
    }
)
_FUNCTIONS = (restore_array, restore_number, restore_rows, restore_method)
_CONTAINERS = (set, frozenset, deque, OrderedDict, Counter, Fraction)
_ADMITTED: Mapping[tuple[str, str], Any] = MappingProxyType(
    {(found.__module__, found.__name__): found for found in (*_FUNCTIONS, *_CONTAINERS)}
)
