"""Adapter slots: which adapters an executor has loaded, and which it loads or evicts next."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

_MAX_FAILURES = 256


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """Loading of `adapter`. `kept`: adapters that stay; the executor evicts all others first."""

    adapter: str
    kept: tuple[str, ...]


class AdapterSlots:
    """Adapters in the memory of one executor, at most `num_slots`.

    With 0 slots, the executor has adapters of its own, and nobody loads them. `load_ns`: time that
    a load usually takes, 0 before the first.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        # Loaded adapters, the least recently used first, each with the last step that had a row of
        # it: the executor may not have answered that step.
        self._last_steps: dict[str, int] = {}
        # With the time in ns since when.
        self._loading: dict[str, int] = {}
        self._failures: dict[str, tuple[str, int]] = {}
        self._begun: list[AdapterLoad] = []
        self.load_ns = 0
        # Totals so far.
        self.num_loads = 0
        self.num_failures = 0
        self.num_evictions = 0

    @property
    def loads_adapters(self) -> bool:
        """Whether the scheduler loads adapters here; else the executor has its own."""
        return self._num_slots > 0

    @property
    def loaded(self) -> Container[str]:
        """Adapters that rows may have."""
        return self._last_steps.keys()

    @property
    def num_slots(self) -> int:
        """Number of adapters that can be loaded at once."""
        return self._num_slots

    @property
    def num_loaded(self) -> int:
        """Number of loaded adapters."""
        return len(self._last_steps)

    @property
    def num_loading(self) -> int:
        """Number of adapters that are being loaded."""
        return len(self._loading)

    @property
    def num_taken(self) -> int:
        """Number of slots with adapters that are loaded or being loaded."""
        return len(self._last_steps) + len(self._loading)

    def is_loading(self, adapter: str) -> bool:
        """Returns whether the executor loads an adapter now."""
        return adapter in self._loading

    def failure(self, adapter: str, since_ns: int | None) -> str | None:
        """Returns the reason of a failed load that ended at `since_ns` or later; None without one.

        `since_ns` None: at any time.
        """
        failed = self._failures.get(adapter)
        if failed is None:
            return None
        why, at_ns = failed
        return why if at_ns >= (since_ns or 0) else None

    def used(self, adapter: str, step_id: int) -> None:
        """Notes that a row has had a loaded adapter up to step `step_id`."""
        if self._last_steps.pop(adapter, None) is not None:
            self._last_steps[adapter] = step_id

    def can_load(self, kept: Container[str], answered_step_id: int) -> bool:
        """Returns whether a slot is free, or has an adapter that can be evicted.

        `kept`: adapters that must stay. `answered_step_id`: the latest step with a result.
        """
        return (
            self.num_taken < self._num_slots or self._evictable(kept, answered_step_id) is not None
        )

    def load(self, adapter: str, kept: Container[str], answered_step_id: int, now_ns: int) -> None:
        """Begins to load an adapter if `can_load`; evicts the least recently used."""
        if self.num_taken >= self._num_slots:
            evicted = self._evictable(kept, answered_step_id)
            assert evicted is not None, "no adapter slot is free"
            del self._last_steps[evicted]
            self.num_evictions += 1
        self._failures.pop(adapter, None)
        # Calls come one after the other: those before have ended when this one begins.
        self._begun.append(AdapterLoad(adapter, (*self._last_steps, *self._loading)))
        self._loading[adapter] = now_ns

    def ended(self, adapter: str, why_not: str, now_ns: int) -> None:
        """Notes that an adapter is loaded, or, with a reason, that it cannot be loaded."""
        begun_ns = self._loading.pop(adapter, None)
        if begun_ns is None:
            return
        if why_not:
            self.num_failures += 1
            self._failures[adapter] = why_not, now_ns
            if len(self._failures) > _MAX_FAILURES:
                del self._failures[next(iter(self._failures))]
            return
        self.num_loads += 1
        self._last_steps[adapter] = 0
        took_ns = now_ns - begun_ns
        self.load_ns = took_ns if self.load_ns == 0 else (3 * self.load_ns + took_ns) // 4

    def take_begun(self) -> list[AdapterLoad]:
        """Returns what has begun to load since the last call."""
        begun, self._begun = self._begun, []
        return begun

    def _evictable(self, kept: Container[str], answered_step_id: int) -> str | None:
        return next(
            (
                adapter
                for adapter, last_step_id in self._last_steps.items()
                if adapter not in kept and last_step_id <= answered_step_id
            ),
            None,
        )
