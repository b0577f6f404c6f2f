"""Fair sharing of bounded resources among tenants: turns, places and shares."""

from splitserve_gateway.sharing.turns import (
    HELD_PER_LEFT,
    FairQueue,
    FairSemaphore,
    Shares,
    TooManyWait,
)

__all__ = ["HELD_PER_LEFT", "FairQueue", "FairSemaphore", "Shares", "TooManyWait"]
