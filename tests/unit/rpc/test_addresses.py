"""Addresses: to listen at, and those that executors may register."""

from __future__ import annotations

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve_common import AddressRules, CannotListen, claim_address, listen_at, read_ip


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


HERE = read_ip("10.1.0.7")


@pytest.mark.parametrize(
    ("rules", "host", "address", "asking", "is_allowed"),
    [
        # Without rules: from where it was asked.
        ("", "10.1.0.7", "10.1.0.7", "10.1.0.7", True),
        ("", "10.1.0.8", "10.1.0.8", "10.1.0.7", False),
        ("", "127.0.0.1", "127.0.0.1", "10.1.0.7", False),
        ("", "127.0.0.1", "127.0.0.1", "127.0.0.1", True),
        ("", "localhost", "::1", "127.0.0.1", True),
        ("", "127.0.0.1", "127.0.0.1", None, True),
        ("", "10.1.0.7", "10.1.0.7", None, False),
        ("", "x", "::ffff:10.1.0.7", "10.1.0.7", True),
        ("", "169.254.1.1", "169.254.1.1", "169.254.1.1", False),
        ("", "fe80::1", "fe80::1", "fe80::1", False),
        ("", "0.0.0.0", "0.0.0.0", "127.0.0.1", False),
        # With rules: these, and no other.
        ("10.0.0.0/8", "10.2.0.1", "10.2.0.1", "10.1.0.7", True),
        ("10.0.0.0/8", "11.0.0.1", "11.0.0.1", "11.0.0.1", False),
        ("fd00::/8", "fd00::5", "fd00::5", "10.1.0.7", True),
        ("*.executors.local", "a.executors.local", "11.0.0.1", "10.1.0.7", True),
        ("*.executors.local", "A.Executors.Local.", "11.0.0.1", "10.1.0.7", True),
        ("*.executors.local", "executors.local.evil", "11.0.0.1", "10.1.0.7", False),
        ("10.0.0.0/8,*.local", "a.local", "11.0.0.1", "10.1.0.7", True),
        # A name, or everything, does not open what it hardly means.
        ("*.executors.local", "a.executors.local", "127.0.0.1", "10.1.0.7", False),
        ("*.executors.local", "a.executors.local", "169.254.169.254", "10.1.0.7", False),
        ("*.executors.local", "a.executors.local", "fd00:ec2::254", "10.1.0.7", False),
        ("0.0.0.0/0,*", "169.254.169.254", "169.254.169.254", "10.1.0.7", False),
        ("0.0.0.0/0,*", "127.0.0.1", "127.0.0.1", "10.1.0.7", False),
        ("0.0.0.0/0,*", "127.0.0.1", "127.0.0.1", "127.0.0.1", True),
        ("0.0.0.0/0,*", "x", "0.0.0.0", "127.0.0.1", False),
        ("::/0,*", "x", "ff02::1", "127.0.0.1", False),
        # What is named itself is meant.
        ("169.254.0.0/16", "169.254.1.1", "169.254.1.1", "10.1.0.7", True),
        ("100.100.100.200", "100.100.100.200", "100.100.100.200", "10.1.0.7", True),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1", "10.1.0.7", True),
    ],
)
def test_address_is_allowed_or_not(
    rules: str, host: str, address: str, asking: str | None, is_allowed: bool
) -> None:
    parsed = AddressRules.parse(rules) if rules else AddressRules()
    by = None if asking is None else read_ip(asking)
    assert parsed.allows(host, read_ip(address), by) is is_allowed


@given(st.ip_addresses())
def test_nothing_but_who_asks_is_allowed_without_rules(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    found = read_ip(str(address))
    assert not AddressRules().allows(str(found), found, HERE) or found == HERE


@pytest.mark.parametrize("text", ["", "10.0.0.1/8", "999.0.0.1", "a,,b", "http://x", "10.0.0.0/99"])
def test_rules_are_refused_when_they_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="allowed: networks"):
        AddressRules.parse(text)
