"""How long a Session that asks for more than it may is not read."""

from __future__ import annotations

from scheduler_service.service.refusal_pause import RefusalPause

QUOTA = "QUOTA_EXCEEDED"


class Clock:
    """Nobody waits."""

    def __init__(self) -> None:
        self.slept_s: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)


async def test_pauses_double_and_begin_again_when_a_submit_was_taken() -> None:
    clock = Clock()
    pause = RefusalPause(clock.sleep, is_patient=False)
    for reason in (QUOTA, QUOTA, QUOTA, QUOTA, QUOTA, QUOTA, None, QUOTA):
        await pause.after(reason)
    assert clock.slept_s == [0.01, 0.02, 0.04, 0.08, 0.1, 0.1, 0.01]


async def test_no_pause_is_made_when_it_was_no_quota_or_the_session_is_for_many() -> None:
    clock = Clock()
    await RefusalPause(clock.sleep, is_patient=False).after("PROMPT_EMPTY")
    await RefusalPause(clock.sleep, is_patient=True).after(QUOTA)
    assert clock.slept_s == []
