"""Where `splitserve serve` has its processes listen."""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest

from splitserve_cli import serve
from tests.support.processes.addresses import reserve_address


def test_live_page_has_an_address_of_its_own_when_two_serve_at_the_same_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = reserve_address()
    monkeypatch.setattr(serve, "_LIVE", usual)
    with ExitStack() as stack:
        # None of their gateways has begun.
        found = [serve.claim_live(None) for _ in range(3)]
        sockets = [each.listening for each in found if each.listening is not None]
        for each in sockets:
            stack.enter_context(closing(each))
        assert len(sockets) == 3
        assert found[0].address == usual
        assert len({each.address for each in found}) == 3
        assert found[1].flags == [
            f"--live-listen={found[1].address}",
            f"--live-socket={sockets[1].fileno()}",
        ]


def test_live_page_is_where_it_is_said() -> None:
    address = reserve_address()
    live = serve.claim_live(address)
    assert live.flags == [f"--live-listen={address}"]
