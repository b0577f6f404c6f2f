"""Adapters in the form that the native decoder takes (native/low_rank.h).

Shape letters: I inputs of a matrix, O outputs, padded to whole panels, H half panels of outputs, r
ranks, of fused matrices one after the other and padded to whole vectors, T input tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitserve_kernels.cpu.library import CAdapter, CLinear, CLowRank, NativeLibrary, pointer
from splitserve_kernels.cpu.operations import PackedLinear
from splitserve_kernels.low_rank_update import LowRankUpdate

_WORD_BYTES = 4
_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class PackedUpdate:
    """Update of a matrix, or of several that are multiplied as one. Fields: see `LowRank`."""

    down: Tensor
    scales: Tensor | None
    up: Tensor
    starts: Tensor
    first_words: Tensor
    num_words: Tensor
    bias: Tensor | None
    gain: Tensor | None
    num_ranks: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all numbers."""
        tensors = (self.down, self.scales, self.up, self.bias, self.gain)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def as_c(self) -> CLowRank:
        """Returns the C structure; the structure does not keep the tensors alive."""
        return CLowRank(
            pointer(self.down),
            pointer(self.scales),
            pointer(self.up),
            pointer(self.starts),
            pointer(self.first_words),
            pointer(self.num_words),
            pointer(self.bias),
            pointer(self.gain),
            self.num_ranks,
        )


class NativeAdapter:
    """An adapter of a native decoder, with packed numbers of its own. `num_bytes`: their size."""

    def __init__(
        self,
        library: NativeLibrary,
        linears: Sequence[PackedUpdate | None],
        embedding: PackedUpdate | None,
        own_embedding: Tensor | None,
        own_head: PackedLinear | None,
    ) -> None:
        """Keeps all of these alive. `linears`: see `Adapter` in low_rank.h."""
        linears = _in_large_pages(library, linears)
        updates = [update for update in (*linears, embedding) if update is not None]
        self.num_bytes = sum(update.num_bytes for update in updates)
        self.num_bytes += 0 if own_head is None else own_head.num_bytes
        in_c = (_update_as_c(update) for update in linears)
        c_linears = (CLowRank * len(linears))(*in_c)
        c_head = None if own_head is None else own_head.as_c()
        self._kept = (updates, own_embedding, own_head, c_linears, c_head)
        self._adapter = CAdapter(
            linears=ctypes.addressof(c_linears),
            embedding=_update_as_c(embedding),
            own_embedding=pointer(own_embedding),
            own_head=_address(c_head),
        )

    @property
    def address(self) -> int:
        """Address of the C structure, valid while this object lives."""
        return ctypes.addressof(self._adapter)


class StepAdapters:
    """Tokens of a step that have an adapter.

    `adapters`: kept alive. `addresses`: theirs, int64. `of_token`: [T] int32, contiguous, each
    token's index in `adapters`, -1 for none.
    """

    def __init__(self, adapters: Sequence[NativeAdapter], of_token: npt.NDArray[np.int32]) -> None:
        self.adapters = adapters
        self.addresses = np.array([adapter.address for adapter in adapters], np.int64)
        self.of_token = of_token


def linear_adapted(
    library: NativeLibrary, weights: PackedLinear, rows: Tensor, adapters: StepAdapters
) -> Tensor:
    """Multiplies as `linear` does, with the first update of each row's adapter: [M, N].

    `adapters`: of the rows [M, K]. The result of a row is bit-identical whatever the other rows
    and their adapters are.
    """
    rows = rows.contiguous()
    output = rows.new_empty(rows.shape[0], weights.num_outputs)
    library.call(
        "linear_adapted",
        weights.dtype,
        ctypes.byref(weights.as_c()),
        pointer(rows),
        ctypes.c_int32(rows.shape[0]),
        pointer(output),
        ctypes.c_void_p(adapters.addresses.ctypes.data),
        ctypes.c_int32(len(adapters.adapters)),
        ctypes.c_void_p(adapters.of_token.ctypes.data),
        ctypes.c_int32(torch.get_num_threads()),
    )
    return output


def pack_update(
    library: NativeLibrary,
    parts: Sequence[LowRankUpdate | None],
    places: Sequence[npt.NDArray[np.int64]],
    num_inputs: int,
    dtype: torch.dtype,
) -> PackedUpdate | None:
    """Packs the updates of fused matrices; returns None without updates.

    `places`: of each part, where its outputs are in the fused matrix. Raises RuntimeError if an
    update has other sizes than its matrix.
    """
    if all(part is None for part in parts):
        return None
    ranks = _Ranks.of(parts, library.lanes, _WORD_BYTES // dtype.itemsize)
    num_outputs = 1 + max(int(own[-1]) for own in places)
    num_outputs = -(-num_outputs // library.panel) * library.panel
    down = torch.zeros(ranks.num_padded, num_inputs, dtype=dtype)
    scales = torch.zeros(ranks.num_padded)
    up = torch.zeros(num_outputs, ranks.num_padded, dtype=dtype)
    owners = np.full(num_outputs, -1)
    for index, (part, own) in enumerate(zip(parts, places, strict=True)):
        if part is not None:
            rows = ranks.of_part(index, part)
            down[rows].copy_(part.down)
            scales[rows] = part.scale
            up[torch.from_numpy(own), rows] = part.up.to(dtype)
            owners[own] = index
    return PackedUpdate(
        _vectors_of(down, library.lanes),
        scales,
        *_half_panels(up, ranks.spans(owners.reshape(-1, library.panel // 2)), library),
        _of_outputs([part.bias if part else None for part in parts], places, num_outputs, 0.0),
        _of_outputs([part.gain if part else None for part in parts], places, num_outputs, 1.0),
        ranks.num_padded,
    )


def pack_embedding_update(
    library: NativeLibrary, update: LowRankUpdate | None, dtype: torch.dtype
) -> PackedUpdate | None:
    """Packs the update of an embedding; returns None without update."""
    if update is None:
        return None
    num_outputs, rank = update.up.shape
    no_inputs = LowRankUpdate(
        torch.zeros(rank, 0, dtype=dtype), update.up, 1.0, update.bias, update.gain
    )
    packed = pack_update(library, [no_inputs], [np.arange(num_outputs)], 0, dtype)
    assert packed is not None, "there is an update"
    table = torch.zeros(update.down.shape[1], packed.num_ranks, dtype=dtype)
    table[:, :rank] = update.down.T.float() * update.scale
    return replace(packed, down=table, scales=None)


@dataclass(frozen=True, slots=True)
class _Ranks:
    """Places of the ranks of several parts. `starts`: of each, and their end, in whole words."""

    starts: npt.NDArray[np.int64]
    per_word: int
    num_padded: int

    @classmethod
    def of(cls, parts: Sequence[LowRankUpdate | None], lanes: int, per_word: int) -> _Ranks:
        counts = [0 if part is None else len(part.down) for part in parts]
        padded = [-(-count // per_word) * per_word for count in counts]
        starts = np.concatenate([[0], np.cumsum(padded)])
        return cls(starts, per_word, -(-int(starts[-1]) // lanes) * lanes)

    def of_part(self, index: int, part: LowRankUpdate) -> slice:
        start = int(self.starts[index])
        return slice(start, start + len(part.down))

    def spans(self, owners: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns first word and number of words of each half panel, [H, 2].

        `owners`: [H, outputs], the part of each output, -1 for none.
        """
        last = owners.max(axis=1)
        first = np.where(owners < 0, last[:, None], owners).min(axis=1)
        begin, end = self.starts[first], self.starts[last + 1]
        spans = np.stack([begin, end - begin], axis=1) // self.per_word
        spans[last < 0] = 0
        return spans


def _vectors_of(rows: Tensor, lanes: int) -> Tensor:
    """Returns [r, I] as vectors of `lanes` rows, whose words lie one after the other."""
    if not rows.numel():
        return rows
    words = rows.view(torch.int32)
    return words.view(-1, lanes, words.shape[1]).transpose(1, 2).contiguous()


def _half_panels(
    up: Tensor, spans: npt.NDArray[np.int64], library: NativeLibrary
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns `up`, `starts`, `first_words` and `num_words` of a PackedUpdate.

    `up`: [O, r]. `spans`: [H, 2], the words of each half panel.
    """
    half = library.panel // 2
    words = up.view(torch.int32).view(len(spans), half // library.lanes, library.lanes, -1)
    starts = np.zeros(len(spans), np.int64)
    packed: list[Tensor] = []
    size = 0
    for first, count in np.unique(spans, axis=0).tolist():
        if not count:
            continue
        panels = np.flatnonzero((spans == (first, count)).all(axis=1))
        starts[panels] = size + np.arange(len(panels)) * half * count
        of_span = words[torch.from_numpy(panels), :, :, first : first + count]
        packed.append(of_span.transpose(2, 3).reshape(-1))
        size += len(packed[-1])
    first_words, num_words = spans.astype(np.int32).T.copy()
    return (
        torch.cat(packed) if packed else torch.empty(0, dtype=torch.int32),
        torch.from_numpy(starts),
        torch.from_numpy(first_words),
        torch.from_numpy(num_words),
    )


def _of_outputs(
    parts: Sequence[Tensor | None],
    places: Sequence[npt.NDArray[np.int64]],
    num_outputs: int,
    default: float,
) -> Tensor | None:
    """Returns numbers of the fused matrix, [O] float32; None if no part has any."""
    if all(part is None for part in parts):
        return None
    joined = torch.full((num_outputs,), default)
    for part, own in zip(parts, places, strict=True):
        if part is not None:
            joined[torch.from_numpy(own)] = part.float()
    return joined


def _in_large_pages(
    library: NativeLibrary, updates: Sequence[PackedUpdate | None]
) -> list[PackedUpdate | None]:
    """Moves the matrices of `updates` to memory of their own: small pages cost a walk each."""
    matrices = [matrix for update in updates if update for matrix in (update.down, update.up)]
    sizes = [-(-matrix.nbytes // _LINE_BYTES) * _LINE_BYTES for matrix in matrices]
    memory = library.cleared_panels(sum(sizes))
    moved = []
    for matrix, place in zip(matrices, torch.split(memory, sizes), strict=True):
        moved.append(place[: matrix.nbytes].view(matrix.dtype).view(matrix.shape))
        moved[-1].copy_(matrix)
    places = iter(moved)
    return [
        None if update is None else replace(update, down=next(places), up=next(places))
        for update in updates
    ]


def _update_as_c(update: PackedUpdate | None) -> CLowRank:
    return CLowRank() if update is None else update.as_c()


def _address(structure: CLinear | None) -> int | None:
    return None if structure is None else ctypes.addressof(structure)
