from __future__ import annotations

import pytest

from executor_service.device.memory import choose_device
from executor_service.errors import BackendUnavailable


@pytest.mark.parametrize(
    ("asked", "num_gpus", "expected"),
    [
        ("auto", 0, ["cpu", "cpu", "cpu"]),
        ("cpu", 2, ["cpu", "cpu", "cpu"]),
        ("auto", 1, ["cuda:0", "cuda:0", "cuda:0"]),
        ("cuda", 2, ["cuda:0", "cuda:1", "cuda:0"]),
        ("auto", 8, ["cuda:0", "cuda:1", "cuda:2"]),
    ],
)
def test_executors_take_gpus_in_turn_when_there_are_several(
    asked: str, num_gpus: int, expected: list[str]
) -> None:
    assert [choose_device(asked, index, num_gpus) for index in range(3)] == expected


def test_executor_says_that_there_is_no_gpu_when_one_is_asked_for() -> None:
    with pytest.raises(BackendUnavailable, match=r"device cuda: torch sees no GPU .* auto or cpu"):
        choose_device("cuda", 0, 0)
