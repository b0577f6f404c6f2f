"""Search for stop strings in a text that arrives in pieces."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence


class _Prefix:
    """Common prefix, of length `depth`, of the sorted stop strings `stops[start:end]`.

    State of an Aho-Corasick automaton (CACM 1975), created when a text first reaches it. So the
    cost depends on what texts have in common with stop strings, and is linear in the length of a
    text. `shorter`: the longest proper suffix of this prefix that is a prefix too; None for the
    empty one. `found`: the longest stop string that is a suffix of this prefix.
    """

    __slots__ = ("children", "depth", "end", "found", "shorter", "start")

    def __init__(self, depth: int, start: int, end: int) -> None:
        self.depth = depth
        self.start = start
        self.end = end
        self.shorter: _Prefix | None = None
        self.found: str | None = None
        self.children: dict[str, _Prefix] = {}


class StopStrings:
    """Cuts text at the first stop string; holds back what may be the start of a stop string.

    If several stop strings end in the same piece of text, such as that of one token, the one that
    starts first wins, then the longest. With `include` the stop string stays in the text.
    """

    def __init__(self, stop_strings: Sequence[str] = (), *, include: bool = False) -> None:
        self._stops = sorted({stop for stop in stop_strings if stop})
        self._include = include
        firsts = "".join(sorted({re.escape(stop[0]) for stop in self._stops}))
        self._first = re.compile(f"[{firsts}]") if firsts else None
        self._root = _Prefix(0, 0, len(self._stops))
        self._state = self._root
        self._held = ""
        self.found: str | None = None

    def __bool__(self) -> bool:
        """Returns whether there are stop strings."""
        return bool(self._stops)

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Returns newly displayable text.

        Sets `found` when a stop string ends it.

        `may_end`: whether a stop string that ends within `text` counts; False for the text of the
        first `min_tokens` tokens. Its start may lie in earlier text.
        """
        if self._first is None:
            return text
        if self.found is not None:
            return ""
        num_held = len(self._held)
        position, best = 0, None
        while position < len(text):
            if self._state is self._root:
                match = self._first.search(text, position)
                if match is None:
                    break
                position = match.start()
            known = self._state.children.get(text[position])
            self._state = known or self._next(self._state, text[position])
            position += 1
            stop = self._state.found
            if may_end and stop is not None:
                hit = (num_held + position - len(stop), -len(stop), stop)
                best = hit if best is None else min(best, hit)
        text = self._held + text
        if best is not None:
            start, _, self.found = best
            self._held = ""
            return text[: start + len(self.found)] if self._include else text[:start]
        num_shown = len(text) - self._num_to_hold()
        self._held = text[num_shown:]
        return text[:num_shown]

    def finish(self) -> str:
        """Returns the text that was held back; no text may follow."""
        held, self._held = self._held, ""
        return held

    def _num_to_hold(self) -> int:
        """Returns the length of the text's end to hold back: it may start a stop string."""
        state: _Prefix | None = self._state
        while state is not None:
            # The last stop string with this prefix is longer than it, unless it is the only one.
            if state.depth < len(self._stops[state.end - 1]):
                return state.depth
            state = state.shorter
        return 0

    def _next(self, state: _Prefix, character: str) -> _Prefix:
        """Returns the longest prefix that is a suffix of the text after one more character."""
        following: _Prefix | None = None
        made: list[_Prefix] = []
        node: _Prefix | None = state
        while node is not None:
            child = node.children.get(character)
            is_new = child is None
            if child is None:
                child = self._make_child(node, character)
            if child is not None:
                following = following or child
                if made:
                    made[-1].shorter = child
                if not is_new:
                    break
                made.append(child)
            node = node.shorter
        for prefix in reversed(made):
            prefix.shorter = prefix.shorter or self._root
            prefix.found = prefix.found or prefix.shorter.found
        return following or self._root

    def _make_child(self, prefix: _Prefix, character: str) -> _Prefix | None:
        """Returns the prefix extended by `character`; None if no stop string starts with it."""
        depth, start, end = prefix.depth, prefix.start, prefix.end

        def following(stop: str) -> str:
            return stop[depth : depth + 1]

        start = bisect_left(self._stops, character, start, end, key=following)
        end = bisect_right(self._stops, character, start, end, key=following)
        if start == end:
            return None
        child = _Prefix(depth + 1, start, end)
        # The shortest stop string with this prefix comes first.
        if len(self._stops[start]) == depth + 1:
            child.found = self._stops[start]
        prefix.children[character] = child
        return child
