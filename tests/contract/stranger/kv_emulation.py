"""A KV cache without a network: a slot remembers which token, position and prefix it stands for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.contract.stranger.truth import CHAIN_START, MASK, mix

GARBAGE = 0xA5A5A5A5DEADBEEF


@dataclass(frozen=True, slots=True)
class Slot:
    """The keys and values of one token. Undefined: the contract promises nothing about them."""

    token_id: int
    position: int
    chain: int
    is_undefined: bool = False


@dataclass(slots=True)
class RowInput:
    """What one row computes in a step, and what became of it."""

    row_id: int
    block_table: Sequence[int]
    first_position: int
    token_ids: list[int]
    chain: int = 0
    read_undefined: bool = False
    problem: str = ""

    @property
    def last_position(self) -> int:
        """Position of the last input token."""
        return self.first_position + len(self.token_ids) - 1


class KvEmulation:
    """Two pools of blocks. Mutated by moves, `compute` and `undefine`."""

    def __init__(self, block_size: int, num_device_blocks: int, num_host_blocks: int) -> None:
        self.block_size = block_size
        self.device = [self._new_block() for _ in range(num_device_blocks)]
        self.host = [self._new_block() for _ in range(num_host_blocks)]

    def _new_block(self) -> list[Slot | None]:
        return [None] * self.block_size

    def move(
        self,
        pairs: Sequence[tuple[int, int]],
        source: list[list[Slot | None]],
        destination: list[list[Slot | None]],
    ) -> None:
        """Copies blocks between pools, as if every source were read first."""
        read = [(list(source[origin]), target) for origin, target in pairs]
        for block, target in read:
            destination[target] = block

    def undefine(self, block: list[Slot | None]) -> None:
        """Overwrites a block with what may be anything, on purpose plausible."""
        for offset, slot in enumerate(block):
            known = slot or Slot(0, -1, GARBAGE)
            block[offset] = replace(known, chain=(known.chain ^ GARBAGE) & MASK, is_undefined=True)

    def undefine_slots(self, row: RowInput, positions: range) -> None:
        """Overwrites single slots in the same way."""
        for position in positions:
            block = self.device[row.block_table[position // self.block_size]]
            known = block[position % self.block_size] or Slot(0, -1, GARBAGE)
            chain = (known.chain ^ GARBAGE) & MASK
            block[position % self.block_size] = replace(known, chain=chain, is_undefined=True)

    def undefine_everything(self) -> None:
        """Both pools, as after a newer scheduler epoch."""
        for block in (*self.device, *self.host):
            self.undefine(block)

    def written_blocks(self, row: RowInput) -> set[int]:
        """Ids of the device blocks that `row` writes."""
        positions = range(row.first_position, row.last_position + 1)
        return {row.block_table[position // self.block_size] for position in positions}

    def slot(self, row: RowInput, position: int) -> Slot | None:
        """What `row` sees at `position` through its block table."""
        block = row.block_table[position // self.block_size]
        return self.device[block][position % self.block_size]

    def compute(self, rows: Sequence[RowInput]) -> None:
        """Writes all new slots, then lets every row read its own. Mutates the rows."""
        self._write(rows)
        for row in rows:
            self._read(row)

    def _write(self, rows: Sequence[RowInput]) -> None:
        """In order of position, since one row may continue a block that another row fills."""
        writers: dict[tuple[int, int], int] = {}
        work = sorted(
            (row.first_position + index, number)
            for number, row in enumerate(rows)
            for index in range(len(row.token_ids))
        )
        for position, number in work:
            row = rows[number]
            block = row.block_table[position // self.block_size]
            key = (block, position % self.block_size)
            if writers.setdefault(key, number) != number:
                row.problem = f"block {block}: two rows of one step write offset {key[1]}"
            start = Slot(0, -1, CHAIN_START, row.read_undefined)
            before = start if position == 0 else self.slot(row, position - 1)
            token_id = row.token_ids[position - row.first_position]
            chain = mix(before.chain if before else 0, token_id, position)
            is_undefined = before is None or before.is_undefined
            self.device[block][key[1]] = Slot(token_id, position, chain, is_undefined)

    def _read(self, row: RowInput) -> None:
        """Checks every slot that attention reads; sets the chain of the last position."""
        chain = CHAIN_START
        for position in range(row.last_position + 1):
            slot = self.slot(row, position)
            if slot is None or (slot.is_undefined is False and slot.position != position):
                row.problem = row.problem or f"position {position} reads {slot}"
                return
            row.read_undefined = row.read_undefined or slot.is_undefined
            if not row.read_undefined and slot.chain != mix(chain, slot.token_id, position):
                row.problem = row.problem or f"position {position} has another prefix"
                return
            chain = slot.chain
        row.chain = (chain ^ GARBAGE) & MASK if row.read_undefined else chain
