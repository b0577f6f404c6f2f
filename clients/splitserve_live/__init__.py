"""Live view of a scheduler, as a web page and in a terminal."""

from splitserve_live.feeds import MAX_FEEDS, Feeds
from splitserve_live.frames import SharedLines, frame_line
from splitserve_live.state import (
    BLOCK_STATES,
    ROW_KINDS,
    LiveState,
    Pool,
    lack_word,
    state_word,
    why,
)
from splitserve_live.terminal_screen import screen

__all__ = [
    "BLOCK_STATES",
    "MAX_FEEDS",
    "ROW_KINDS",
    "Feeds",
    "LiveState",
    "Pool",
    "SharedLines",
    "frame_line",
    "lack_word",
    "screen",
    "state_word",
    "why",
]
