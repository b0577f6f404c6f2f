"""Who counts as one where floods are told apart by where they come from."""

from __future__ import annotations

import pytest

from splitserve_gateway.http.listener import origin_of


@pytest.mark.parametrize(
    ("one", "other", "are_same"),
    [
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("a-socket", "another", False),
    ],
)
def test_origins_are_addresses_or_networks(one: str, other: str, are_same: bool) -> None:
    assert (origin_of((one, 1)) == origin_of((other, 2))) is are_same


def test_origin_is_empty_when_there_is_none() -> None:
    assert origin_of(None) == ""
