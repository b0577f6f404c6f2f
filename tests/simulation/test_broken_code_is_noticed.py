"""The simulation notices code that is broken on purpose: each way of breaking it is found."""

from __future__ import annotations

import pytest

from tests.simulation.planted import PLANTED, num_until_found

pytestmark = pytest.mark.cases(5)

# Most histories that it may take.
_MOST = 200


@pytest.mark.parametrize("name", PLANTED)
def test_the_simulation_finds_a_fault_of_ours_when(name: str) -> None:
    planted = PLANTED[name]
    assert num_until_found(planted.draw, range(2)) is None
    with planted.there():
        assert num_until_found(planted.draw, range(_MOST)), "nothing was noticed"
