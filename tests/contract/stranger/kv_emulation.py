"""A KV cache without a network: a slot remembers which token, position and prefix it stands for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.contract.stranger.truth import MASK, encoder_start, mix, row_start

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
    """What one row computes in a step, and what became of it.

    `start`: the chain before its first token, once its cross blocks were read.
    """

    row_id: int
    block_table: Sequence[int]
    first_position: int
    token_ids: list[int]
    adapter: str = ""
    cross_blocks: Sequence[int] = ()
    num_encoder_tokens: int = 0
    encoder_token_ids: Sequence[int] = ()
    start: int = 0
    chain: int = 0
    read_undefined: bool = False
    problem: str = ""

    @property
    def last_position(self) -> int:
        """Position of the last input token."""
        return self.first_position + len(self.token_ids) - 1


class KvEmulation:
    """Two pools of blocks. Mutated by moves, `compute` and `undefine`.

    `window`: how many tokens a token attends to, itself included; None for all.
    """

    def __init__(
        self,
        block_size: int,
        num_device_blocks: int,
        num_host_blocks: int,
        window: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.window = window
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
        written = {row.block_table[position // self.block_size] for position in positions}
        encoded = range(0, len(row.encoder_token_ids), self.block_size)
        return written | {row.cross_blocks[position // self.block_size] for position in encoded}

    def slot(self, row: RowInput, position: int) -> Slot | None:
        """What `row` sees at `position` through its block table."""
        block = row.block_table[position // self.block_size]
        return self.device[block][position % self.block_size]

    def compute(self, rows: Sequence[RowInput]) -> None:
        """Encodes, writes all new slots, then lets every row read its own. Mutates the rows."""
        for row in rows:
            self._encode(row)
        for row in rows:
            row.start = row_start(row.adapter, self._read_encoder(row))
        self._write(rows)
        for row in rows:
            self._read(row)

    def _encode(self, row: RowInput) -> None:
        chain = encoder_start(row.adapter)
        for position, token_id in enumerate(row.encoder_token_ids):
            chain = mix(chain, token_id, position)
            block = self.device[row.cross_blocks[position // self.block_size]]
            block[position % self.block_size] = Slot(token_id, position, chain)

    def _read_encoder(self, row: RowInput) -> int | None:
        """The chain of the row's last encoder token, None if it has none."""
        before = chain = encoder_start(row.adapter)
        for position in range(row.num_encoder_tokens):
            block = self.device[row.cross_blocks[position // self.block_size]]
            slot = block[position % self.block_size]
            if slot is None:
                row.problem = row.problem or f"encoder position {position} was never written"
                return None
            row.read_undefined = row.read_undefined or slot.is_undefined
            if not row.read_undefined and slot.chain != mix(before, slot.token_id, position):
                row.problem = row.problem or f"encoder position {position} reads {slot}"
            before = chain = slot.chain
        return chain if row.num_encoder_tokens else None

    def _first_in_sight(self, position: int) -> int:
        return 0 if self.window is None else max(0, position - self.window + 1)

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
            is_first = self._first_in_sight(position) == position
            start = Slot(0, -1, row.start, row.read_undefined)
            before = start if is_first else self.slot(row, position - 1)
            token_id = row.token_ids[position - row.first_position]
            chain = mix(before.chain if before else 0, token_id, position)
            is_undefined = before is None or before.is_undefined
            self.device[block][key[1]] = Slot(token_id, position, chain, is_undefined)

    def _read(self, row: RowInput) -> None:
        """Checks every slot that attention reads; sets the chain of the last position."""
        chain = row.start
        first = self._first_in_sight(row.first_position)
        for position in range(first, row.last_position + 1):
            slot = self.slot(row, position)
            if slot is None or (slot.is_undefined is False and slot.position != position):
                row.problem = row.problem or f"position {position} reads {slot}"
                return
            row.read_undefined = row.read_undefined or slot.is_undefined
            # What the first slot in a window leans on is out of sight.
            is_known = position > first or first == 0
            expected = mix(row.start if self.window == 1 else chain, slot.token_id, position)
            if is_known and not row.read_undefined and slot.chain != expected:
                row.problem = row.problem or f"position {position} has another prefix"
                return
            chain = slot.chain
        row.chain = (chain ^ GARBAGE) & MASK if row.read_undefined else chain
