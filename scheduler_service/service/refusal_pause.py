"""Who is refused again and again is read more slowly: refusals take time from others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

_FIRST_S = 0.01
_MOST_S = 0.1

Sleep = Callable[[float], Awaitable[object]]


class RefusalPause:
    """Of one Session. `is_patient`: one whose requests are many tenants'; it never pauses."""

    def __init__(self, sleep: Sleep, *, is_patient: bool) -> None:
        self._sleep = sleep
        self._is_patient = is_patient
        self._next_s = _FIRST_S

    async def after(self, refusal_reason: str | None) -> None:
        """Pauses after a submit that was refused for its tenant's quota; None: it was not."""
        if refusal_reason is None:
            self._next_s = _FIRST_S
        elif refusal_reason == "QUOTA_EXCEEDED" and not self._is_patient:
            pause_s, self._next_s = self._next_s, min(2 * self._next_s, _MOST_S)
            await self._sleep(pause_s)
