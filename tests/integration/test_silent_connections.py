"""Tests how soon gRPC notices a dark peer; the simulated network assumes these times."""

from __future__ import annotations

import asyncio

import pytest

from splitserve_rpc import KEEPALIVE_S, PING_TIMEOUT_S
from tests.support.chaos.dark_connection import can_drop, measure

# Of a machine with much other work.
SLACK_S = 10.0


@pytest.mark.parametrize("how", ["stop", "drop"])
async def test_both_ends_notice_a_dark_peer_in_time(how: str) -> None:
    if how == "drop" and not await asyncio.to_thread(can_drop):
        pytest.skip("this machine allows no network namespaces, or has neither iptables nor nft")
    noticed_s = await asyncio.to_thread(measure, how)
    assert noticed_s.keys() == {"client", "server"}
    assert max(noticed_s.values()) <= KEEPALIVE_S + PING_TIMEOUT_S + SLACK_S, noticed_s
