"""Whether attention minds that all layers of a block lie together, far from the next block.

With 32 layers as an 8B Llama has, a layer reads 64 KiB out of every 2 MiB. The other layout, a pool
for each layer, is the same memory cut the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.gpu_check.attention_times import attending_in, plain_layer
from benchmarks.gpu_check.backends import timed_backends
from benchmarks.gpu_check.cases import Case
from benchmarks.gpu_check.machine import rates_of
from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.sizes import Sizes
from benchmarks.gpu_check.timing import median_s, recorded
from executor_service.backends import Candidate

_BATCHES = ((256, 1024), (32, 8192), (8, 16384), (1, 131072))
_NUM_LAYERS = 32
# Below, it is not worth another layout.
_WORTH_IT = 1.03


def cases(sizes: Sizes) -> Iterator[Case]:
    """Of each backend, both layouts over the same rows."""
    for candidate in timed_backends(sizes):
        for num_rows, context in _BATCHES:
            name = f"{candidate.name}, {num_rows} rows of {context}"
            run = partial(_measure, name, candidate, (num_rows, context), sizes)
            yield Case(name, 12, run)


def _measure(
    name: str, candidate: Candidate, batch: tuple[int, int], sizes: Sizes
) -> Iterator[Measurement]:
    num_rows, context = batch
    rows = sizes.rows(((context - 1, 1),) * num_rows)
    layer, num_layers = plain_layer(sizes), 2 if sizes.is_smoke else _NUM_LAYERS
    num_bytes = num_layers * layer.num_bytes(rows, sizes.dtype)

    def share(attend: Callable[[], None]) -> float:
        replay = recorded(attend, sizes.device)
        return num_bytes / median_s(replay, sizes.device, sizes.num_runs)

    together = share(attending_in(candidate, layer, rows, sizes, num_layers))
    bandwidth = rates_of(sizes).bandwidth
    yield Measurement(f"{name}, all layers in a block", together / bandwidth, "of copy")
    each = [attending_in(candidate, layer, rows, sizes, 1) for _ in range(num_layers)]

    def attend_in_each() -> None:
        for attend in each:
            attend()

    apart = share(attend_in_each)
    yield Measurement(f"{name}, a pool for each layer", apart / bandwidth, "of copy")
    gain = apart / together
    note = "a pool for each layer is worth it" if gain >= _WORTH_IT else "the layout does no harm"
    yield Measurement(f"{name}, gain of pools apart", gain, "times", note=note)
