"""What a head reads of each token, kept in the blocks that the token's keys and values are in.

So it is moved, copied and found with them, and nobody has to remember it. Shape letters: N blocks,
B block size, W width of the head, M of the model, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from executor_service.device.kv_cache import LayerShape


def states_shape(width: int) -> LayerShape:
    """What they take of a block: as much as keys of that size, without values."""
    return LayerShape(num_kv_heads=1, key_dim=width, value_dim=0)


class HeadStates:
    """States of tokens, by the slots of these tokens."""

    def __init__(self, pool: Tensor, join: Callable[[Tensor], Tensor]) -> None:
        """`pool`: [N, B, 1, W]. `join`: makes states [T, W] of those of the model [T, 3 M]."""
        self._pool = pool
        self._join = join

    def take(self, states: Tensor, slots: Tensor) -> None:
        """Those of the model, [3, T, M] in any dtype, of the tokens at `slots` [T]."""
        joined = states.transpose(0, 1).flatten(1).to(self._pool.dtype)
        self.put(slots, self._join(joined))

    def put(self, slots: Tensor, states: Tensor) -> None:
        """`states` [T, W] are those of `slots` [T] int64 from now on."""
        self._pool[slots // self._block_size, slots % self._block_size, 0] = states

    def of(self, slots: Tensor) -> Tensor:
        """[T, W] of `slots` [T] int64."""
        return self._pool[slots // self._block_size, slots % self._block_size, 0]

    @property
    def _block_size(self) -> int:
        return self._pool.shape[1]
