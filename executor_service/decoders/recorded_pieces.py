"""Steps with prompts on a GPU: what lies between two attentions is recorded, and replayed.

What attention launches depends on the rows of a step. All else depends on the number of its tokens
alone, and that is recorded for some numbers; tokens are added up to the next of these. So a step
launches a replay and attention for each layer, instead of some ten kernels: below some hundred
tokens, launching these takes the host longer than the device needs.

Shape letters: T tokens of a recording, L layers, H query heads, D head size, W width of the model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from executor_service.decoders.decoder import DecoderModel
from executor_service.device.cuda_graphs import CudaGraphs, Recorder
from executor_service.device.kv_cache import KVCache
from executor_service.device.streams import streams_of
from executor_service.device.uploads import Uploads
from executor_service.errors import RecordingFailed
from executor_service.model.input_batch import InputBatch, PassRows, Readout
from executor_service.model.loaded_model import LoadedModel
from executor_service.model.paged_model import MakeModel, PagedModel
from splitserve_kernels.paged_batch import lay_out_rows

if TYPE_CHECKING:
    # It needs Triton already when it is imported.
    from executor_service.decoders.gpu_decoder import GpuDecoder

# Beyond the largest the device has more to do than the host, also for small models.
_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512)
# Of logits, relative, as in `decode_graphs`: a token that reads what is not its own is off by 1.
_TOLERANCE = 0.06

_log = logging.getLogger(__name__)


class RecordedPieces:
    """A decoder's PagedModel whose steps with prompts are replayed, up to a number of tokens."""

    def __init__(
        self, decoder: GpuDecoder, model: PagedModel, cache: KVCache, max_num_tokens: int
    ) -> None:
        """`model` is that of `decoder` on the pools of `cache`; it does what is not recorded."""
        self._decoder = decoder
        self._model = model
        self._cache = cache
        self._sizes = [*(s for s in _SIZES if s < max_num_tokens), min(_SIZES[-1], max_num_tokens)]
        most, shape, device = self._sizes[-1], decoder.shape, cache.device
        self._input_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._input_ids)
        self._slots = torch.full_like(self._input_ids, -1)

        def numbers(*sizes: int) -> Tensor:
            return torch.zeros(most, *sizes, dtype=decoder.dtype, device=device)

        # What a piece leaves for the next; another may use what else it allocated.
        self._hidden, self._addend = numbers(shape.width), numbers(shape.width)
        self._query = numbers(shape.num_heads, shape.head_dim)
        self._attended = numbers(shape.num_heads, shape.head_dim)
        self._replays: dict[int, list[Callable[[], None]]] = {}

    @torch.inference_mode()
    def record(self, recorder: Recorder) -> bool:
        """Records, and tries what was recorded; what it writes to the pools nobody may need yet.

        Returns whether all is well. If not, says so, and all steps go to the model. Raises
        RecordingFailed if the process cannot go on.
        """
        started = time.perf_counter()
        try:
            # The largest first: the others then fit into its memory.
            for size in reversed(self._sizes):
                self._replays[size] = [recorder.record(run) for run in self._pieces(size)]
            errors = [self._error(size) for size in self._sizes]
        except RecordingFailed:
            raise
        except Exception as error_raised:  # out of memory, mostly
            self._replays.clear()
            _log.exception("prompt_graphs_failed reason=%r", type(error_raised).__name__)
            return False
        # Some may be NaN.
        wrong = [error for error in errors if not error <= _TOLERANCE]
        if wrong:
            self._replays.clear()
            _log.error("prompt_graphs_refused relative_error=%.2g", wrong[0])
            return False
        seconds = time.perf_counter() - started
        num_graphs = len(self._sizes) * (self._decoder.num_layers + 1)
        _log.info("prompt_graphs_recorded num_graphs=%d seconds=%.1f", num_graphs, seconds)
        return True

    def logits(self, batch: InputBatch) -> Tensor:
        num_tokens = len(batch.rows.token_ids)
        # Decodes are recorded as a whole, by others.
        if not self._replays or batch.rows.is_decode or num_tokens > self._sizes[-1]:
            return self._model.logits(batch)
        return self._replay(batch, num_tokens)

    def _replay(self, batch: InputBatch, num_tokens: int) -> Tensor:
        decoder, paged, cache = self._decoder, batch.paged, self._cache
        size = next(size for size in self._sizes if size >= num_tokens)
        real = slice(num_tokens)
        self._input_ids[real].copy_(batch.input_ids[0])
        self._positions[real].copy_(batch.position_ids[0])
        self._slots[real].copy_(paged.slot_mapping)
        self._slots[num_tokens:size].fill_(-1)
        first, *others = self._replays[size]
        first()
        for layer, replay in enumerate(others):
            attended = decoder.attend(layer, self._query[real], paged, cache)
            self._attended[real].copy_(attended)
            replay()
        index = batch.logits_index
        return decoder.read_out(self._hidden[index], self._addend[index])

    def _pieces(self, size: int) -> list[Callable[[], None]]:
        """What comes before the first attention, between two, and behind the last: L + 1."""
        decoder, part = self._decoder, slice(size)
        hidden, query, attended = self._hidden[part], self._query[part], self._attended[part]
        input_ids, positions = self._input_ids[part], self._positions[part]
        slots, cache = self._slots[part], self._cache
        # All layers turn alike, so the first piece looks up for all.
        write = decoder.kv_write(positions, slots, cache)

        def begin() -> None:
            decoder.look_up(input_ids, positions, hidden, write)
            decoder.before_attention(0, hidden, None, write, query)

        def between(layer: int) -> None:
            _, addend = decoder.after_attention(layer, hidden, attended, in_place=True)
            decoder.before_attention(layer + 1, hidden, addend, write, query)

        def end() -> None:
            last = decoder.num_layers - 1
            _, addend = decoder.after_attention(last, hidden, attended, in_place=True)
            self._addend[part].copy_(addend)

        pieces: list[Callable[[], None]] = [begin]
        pieces += [_bound(between, layer) for layer in range(decoder.num_layers - 1)]
        return [*pieces, end]

    def _error(self, size: int) -> float:
        """How far a replay of up to `size` tokens is from the model's logits, relative to these."""
        rows = self._trial_rows(size)
        everything = np.arange(len(rows.token_ids))
        readout = Readout(np.zeros(1, np.int64), np.zeros_like(everything[1:]), everything[1:])
        uploads = Uploads(self._cache.device, streams_of(self._cache.device))
        batch = InputBatch(readout, rows, uploads)
        expected = self._model.logits(batch).clone()
        difference = self._replay(batch, len(rows.token_ids)) - expected
        return float((difference.norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)).max())

    def _trial_rows(self, size: int) -> PassRows:
        """One prompt, as long as the pool allows, and one less than recorded: a token is added."""
        cache = self._cache
        room = min(cache.num_device_blocks * cache.block_size, self._decoder.max_model_len)
        num_tokens = max(1, min(size - 1, room))
        tables = np.arange(-(-num_tokens // cache.block_size), dtype=np.int32)[None]
        computed, new = np.zeros(1, np.int64), np.array([num_tokens])
        layout = lay_out_rows(tables, computed, new, cache.block_size)
        tokens = np.arange(num_tokens)
        return PassRows(tokens % self._decoder.vocab_size, computed, tables, layout, tokens)


def _bound(run: Callable[[int], None], layer: int) -> Callable[[], None]:
    return lambda: run(layer)


def in_recorded_pieces(
    decoder: GpuDecoder,
    max_num_tokens: int,
    make_recorder: Callable[[], Recorder] = CudaGraphs,
) -> MakeModel:
    """Makes models of `decoder` whose steps of up to `max_num_tokens` are recorded in pieces.

    What could not be recorded once is not tried again.
    """
    is_recordable = True

    def make(_loaded: LoadedModel, cache: KVCache) -> PagedModel:
        nonlocal is_recordable
        model = DecoderModel(decoder, cache)
        if not is_recordable:
            return model
        pieces = RecordedPieces(decoder, model, cache, max_num_tokens)
        is_recordable = pieces.record(make_recorder())
        return pieces if is_recordable else model

    return make
