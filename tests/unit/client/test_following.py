"""Which schedulers a client believes that another one names."""

from __future__ import annotations

import pytest

from splitserve_client.following import allowed

OWN = "10.0.0.5:50051"
SIBLING, OTHER = "10.0.0.5:50061", "10.0.0.6:50051"


@pytest.mark.parametrize(
    ("named", "has_credential", "is_vouched", "expected"),
    [
        ([OTHER, SIBLING], False, False, [OTHER, SIBLING]),
        # Its key goes to no other host, unless the operator's own authority certifies that.
        ([OTHER, SIBLING], True, False, [SIBLING]),
        ([OTHER, SIBLING], True, True, [OTHER, SIBLING]),
        # Services of the client's own machine, and what clouds tell there.
        (["127.0.0.1:80", "localhost:80", "[::1]:80", "169.254.169.254:80"], False, True, []),
        (["", "x", "10.0.0.6", "10.0.0.6:0x50", "10.0.0.6:99999", "a b:1"], False, True, []),
        ([OTHER] * 3, False, False, [OTHER]),
        ([f"10.0.1.{number}:1" for number in range(20)], False, False,
         [f"10.0.1.{number}:1" for number in range(8)]),
    ],
)  # fmt: skip
def test_client_goes_nowhere_that_it_should_not(
    named: list[str], has_credential: bool, is_vouched: bool, expected: list[str]
) -> None:
    found = allowed(OWN, named, has_credential=has_credential, is_vouched=is_vouched)
    assert found == expected


def test_client_on_the_machine_of_its_scheduler_goes_on_there() -> None:
    named = ["127.0.0.1:50061"]
    assert allowed("127.0.0.1:50051", named, has_credential=True, is_vouched=False) == named
