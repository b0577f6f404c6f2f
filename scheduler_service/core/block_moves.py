"""Block pairs that a step moves."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockMoves:
    """(source, destination) pairs of the three phases; see `BlockMoves` in the proto."""

    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    copy: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.copy)

    def __len__(self) -> int:
        return len(self.swap_out) + len(self.swap_in) + len(self.copy)

    @property
    def device_destinations(self) -> set[int]:
        """Device blocks that are overwritten."""
        return {destination for _, destination in [*self.swap_in, *self.copy]}

    @property
    def host_destinations(self) -> set[int]:
        """Host blocks that are overwritten."""
        return {destination for _, destination in self.swap_out}
