"""Metadata and tensors of a GGUF file, or of a set of them that holds one model.

Source: docs/gguf.md of https://github.com/ggml-org/ggml. The package `gguf` reads the same, but
takes seconds for a vocabulary of 150,000 tokens.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from executor_service.errors import ModelUnreadable, ModelUnsupported
from executor_service.quantization.gguf_blocks import BLOCK_TYPES
from splitserve_options import NoCheckpoint, gguf_files

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_COUNT = 2**31
_STRING, _ARRAY = 8, 9
# Formats of `struct`, by the number of the type.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Types of tensors by their numbers (`ggml_type`).
_TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K",
    11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 28: "F64", 29: "IQ1_M",
    30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in a file. `shape`: the last number is that of neighbouring elements.

    `data`: its bytes, [rows, bytes of a row] uint8, a view of the mapped file.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    data: Tensor

    @property
    def is_quantised(self) -> bool:
        """Whether its numbers are codes."""
        return self.type_name not in PLAIN_TYPES

    def plain(self) -> Tensor:
        """Returns a view of the numbers in their shape and dtype. They must not be codes."""
        return self.data.reshape(-1).view(PLAIN_TYPES[self.type_name]).view(self.shape)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Contents of one model. `metadata`: as in the first file. `paths`: all its files."""

    paths: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Reads the model of which `path` is one file. Tensors are views of the mapped files.

    Raises ModelUnreadable for broken, truncated or missing files, ModelUnsupported for types of
    tensors that are not read.
    """
    try:
        paths = gguf_files(path)
    except NoCheckpoint as error:
        raise ModelUnreadable(str(error)) from error
    tensors: dict[str, GgufTensor] = {}
    first: Mapping[str, Any] = {}
    for number, each in enumerate(paths):
        metadata, own, _ = _read_file(each)
        first = metadata if number == 0 else first
        tensors.update(own)
    expected = first.get("split.tensors.count")
    if isinstance(expected, int) and expected != len(tensors):
        raise ModelUnreadable(f"{path}: {len(tensors)} tensors where {expected} are declared")
    return GgufFile(paths, first, tensors)


def parse_gguf(name: str, content: bytes) -> GgufFile:
    """Reads the content of one file, called `name`. Raises the errors of `read_gguf`."""
    path = Path(name)
    # A copy that may be written to: tensors are views of it.
    metadata, tensors, _ = _parsed(path, memoryview(bytearray(content)))
    return GgufFile((path,), metadata, tensors)


def gguf_header_bytes(path: Path) -> int:
    """Returns the number of bytes before the first tensor of one file. Raises ModelUnreadable."""
    return _read_file(path)[2]


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor], int]:
    try:
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    except (OSError, ValueError) as error:
        raise ModelUnreadable(f"{path}: not readable ({error})") from error
    return _parsed(path, data)


def _parsed(path: Path, data: memoryview) -> tuple[dict[str, Any], dict[str, GgufTensor], int]:
    try:
        return _Reader(path, data).read()
    except (struct.error, IndexError, OverflowError, RecursionError) as error:
        raise ModelUnreadable(f"{path}: truncated or corrupt") from error


class _Reader:
    """Position in a file that is read from its start."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor], int]:
        """Returns metadata, tensors, and the number of bytes before these."""
        if bytes(self._data[:4]) != _MAGIC:
            raise ModelUnreadable(f"{self._path}: not a GGUF file")
        self._at = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ModelUnsupported(
                f"{self._path}: GGUF version {version}, not served; supported: 2 and 3 in"
                " little-endian order"
            )
        num_tensors, num_entries = self._count(), self._count()
        metadata = {self._string(): self._value(self._scalar("I")) for _ in range(num_entries)}
        described = [self._described() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelUnreadable(
                f"{self._path}: general.alignment is {alignment!r}; allowed: a positive integer"
            )
        start = -(-self._at // alignment) * alignment
        tensors = [self._tensor(start, *each) for each in described]
        return metadata, {tensor.name: tensor for tensor in tensors}, start

    def _scalar(self, code: str) -> Any:  # noqa: ANN401
        size = struct.calcsize(code)
        value = struct.unpack_from(f"<{code}", self._data, self._at)[0]
        self._at += size
        return value

    def _count(self) -> int:
        count = int(self._scalar("Q"))
        if count > _MAX_COUNT:
            raise OverflowError(count)
        return count

    def _string(self) -> str:
        length = self._count()
        text = bytes(self._data[self._at : self._at + length])
        if len(text) < length:
            raise IndexError(length)
        self._at += length
        return text.decode("utf-8", errors="surrogateescape")

    def _value(self, kind: int) -> Any:  # noqa: ANN401
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind]) if kind in _SCALARS else self._unknown(kind)
        item_kind, count = self._scalar("I"), self._count()
        if item_kind in (_STRING, _ARRAY):
            return [self._value(item_kind) for _ in range(count)]
        code = _SCALARS[item_kind] if item_kind in _SCALARS else self._unknown(item_kind)
        values = struct.unpack_from(f"<{count}{code}", self._data, self._at)
        self._at += count * struct.calcsize(code)
        return list(values)

    def _unknown(self, kind: int) -> Any:  # noqa: ANN401
        raise ModelUnreadable(f"{self._path}: metadata of type {kind}; allowed: 0 to 12")

    def _described(self) -> tuple[str, tuple[int, ...], int, int]:
        """Returns name, shape, type and offset of a tensor."""
        name, num_dims = self._string(), self._scalar("I")
        shape = tuple(self._count() for _ in range(num_dims))
        return name, shape[::-1], self._scalar("I"), self._scalar("Q")

    def _tensor(
        self, start: int, name: str, shape: tuple[int, ...], type_number: int, offset: int
    ) -> GgufTensor:
        type_name = _TYPE_NAMES.get(type_number, str(type_number))
        if type_name in PLAIN_TYPES:
            num_elements, num_bytes = 1, PLAIN_TYPES[type_name].itemsize
        elif type_name in BLOCK_TYPES:
            block = BLOCK_TYPES[type_name]
            num_elements, num_bytes = block.num_elements, block.num_bytes
        else:
            allowed = ", ".join((*PLAIN_TYPES, *BLOCK_TYPES))
            raise ModelUnsupported(
                f"{self._path}: {name} has type {type_name}, not served; supported: {allowed}"
            )
        if 0 in shape:
            raise ModelUnreadable(
                f"{self._path}: {name} has shape {list(shape)}; allowed: positive sizes"
            )
        if shape[-1] % num_elements:
            raise ModelUnreadable(
                f"{self._path}: rows of {name} have {shape[-1]} numbers, which is no multiple of"
                f" {num_elements}, the block of {type_name}"
            )
        row_bytes = shape[-1] // num_elements * num_bytes
        num_rows = math.prod(shape[:-1])
        end = start + offset + num_rows * row_bytes
        if end > len(self._data):
            raise ModelUnreadable(
                f"{self._path}: truncated, {len(self._data)} bytes where {name} ends at {end}"
            )
        data = torch.frombuffer(
            self._data, dtype=torch.uint8, count=num_rows * row_bytes, offset=start + offset
        )
        return GgufTensor(name, type_name, shape, data.view(num_rows, row_bytes))
