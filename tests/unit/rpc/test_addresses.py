from __future__ import annotations

import socket

import pytest

from splitserve_rpc.addresses import CannotListen, claim_address, listen_at


def test_claim_address_gives_a_port_when_any_will_do() -> None:
    host, _, port = claim_address("127.0.0.1:0").rpartition(":")

    assert host == "127.0.0.1"
    assert int(port) > 0


def test_claim_address_raises_when_the_port_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(CannotListen, match=f"{address}: the port is in use"):
            claim_address(address)


def test_claim_address_raises_when_the_host_is_unknown() -> None:
    with pytest.raises(CannotListen, match=r"unknown host no-such-host\.invalid"):
        claim_address("no-such-host.invalid:1")


def test_address_is_kept_from_others_while_its_socket_listens() -> None:
    with listen_at("127.0.0.1:0") as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(CannotListen, match="in use"):
            listen_at(address)
    listen_at(address).close()
