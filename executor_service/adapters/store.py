"""Store of loaded adapters: what rows may name, and why others could not be loaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping

from executor_service.device import available_host_bytes, is_out_of_memory
from executor_service.errors import one_line
from executor_service.model import Adapter, LoadedAdapters
from splitserve_contract import DomainError

# Reading an adapter takes its bytes as they came, its tensors, and those in the model's dtype.
_COPIES = 3

# Reads an adapter of a name from the contents of its files. Raises AdapterInvalid.
ReadAdapter = Callable[[str, Mapping[str, bytes]], Adapter]

_log = logging.getLogger(__name__)


class AdapterStore:
    """Adapters in memory, at most `max_num_loaded`. Any one thread at a time may change it."""

    def __init__(
        self,
        loaded: LoadedAdapters,
        read: ReadAdapter,
        max_num_loaded: int,
        free_bytes: Callable[[], int] = available_host_bytes,
    ) -> None:
        """`loaded`: where rows find adapters. `free_bytes`: memory that is left."""
        self._loaded = loaded
        self._read = read
        self._max_num_loaded = max_num_loaded
        self._free_bytes = free_bytes

    def has(self, name: str) -> bool:
        """Returns whether an adapter is loaded."""
        return name in self._loaded.by_name

    def keep(self, names: Collection[str]) -> None:
        """Removes all adapters but these."""
        present = self._loaded.by_name
        gone = [name for name in present if name not in names]
        if gone:
            self._loaded.by_name = {n: each for n, each in present.items() if n in names}
            _log.info("adapters_evicted num_adapters=%d names=%s", len(gone), ",".join(gone))

    def check_room(self, num_bytes: int) -> None:
        """Raises DomainError(ADAPTERS_FULL) if no adapter of this size can be loaded."""
        if len(self._loaded.by_name) >= self._max_num_loaded:
            message = f"{len(self._loaded.by_name)} adapters are loaded, the maximum"
            raise DomainError("ADAPTERS_FULL", f"{message} (--max-adapters)")
        if _COPIES * num_bytes > self._free_bytes():
            raise DomainError(
                "ADAPTERS_FULL",
                f"not enough memory for an adapter of {num_bytes} bytes: {self._free_bytes()} bytes"
                f" are free, and reading takes {_COPIES} times its size",
            )

    def load(self, name: str, files: Mapping[str, bytes]) -> None:
        """Loads an adapter from the contents of its files. Blocks.

        Raises AdapterInvalid, and DomainError(ADAPTERS_FULL) if the device has no memory for it.
        """
        begun_s = time.monotonic()
        try:
            adapter = self._read(name, files)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise DomainError(
                "ADAPTERS_FULL", f"no memory for {name}: {one_line(error)}"
            ) from error
        self._loaded.by_name = {**self._loaded.by_name, name: adapter}
        _log.info(
            "adapter_loaded name=%s num_bytes=%d took_ms=%.0f",
            name,
            adapter.num_bytes,
            1e3 * (time.monotonic() - begun_s),
        )
