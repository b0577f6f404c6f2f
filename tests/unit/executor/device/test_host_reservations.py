from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from executor_service.device.memory import HostReservations

# Larger than what a test process can come to use meanwhile by orders of magnitude.
GIB = 2**30
RESERVE = """
import sys
from pathlib import Path
from executor_service.device.memory import HostReservations
reservations = HostReservations(Path(sys.argv[1]))
with reservations.planning():
    reservations.reserve(int(sys.argv[2]))
print("reserved", flush=True)
sys.stdin.read()
"""


def _share(directory: Path, available: int, num_sharing: int = 1, weights: int = 0) -> int:
    reservations = HostReservations(directory, num_sharing)
    with reservations.planning():
        return reservations.share_of(available, weights)


def test_share_of_is_all_there_is_when_nobody_else_reserved(tmp_path: Path) -> None:
    assert _share(tmp_path, 100 * GIB) == 100 * GIB
    assert HostReservations().share_of(100 * GIB, 0) == 100 * GIB


def test_share_of_leaves_out_what_a_process_reserved_until_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RESERVE, str(tmp_path), str(30 * GIB)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"reserved\n"
        left = _share(tmp_path, 100 * GIB)
        other.kill()
    # Little of it is touched, if the process grew a bit since.
    assert 70 * GIB <= left < 71 * GIB
    assert _share(tmp_path, 100 * GIB) == 100 * GIB
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_share_of_divides_what_there_is_when_executors_start_together(tmp_path: Path) -> None:
    kept, total = [], 0
    for _ in range(4):
        reservations = HostReservations(tmp_path, 4)
        with reservations.planning():
            # Each has its weights already, and those that come need as much.
            share = reservations.share_of(20 * GIB, 1 * GIB)
            kept.append(reservations.reserve(share))
        total += share
    assert 16 * GIB <= total <= 20 * GIB + GIB // 10
    assert _share(tmp_path, 20 * GIB) <= 20 * GIB - total + GIB // 10
    for release in kept:
        release()
    assert _share(tmp_path, 20 * GIB) == 20 * GIB


def test_share_of_is_nothing_when_others_reserved_all(tmp_path: Path) -> None:
    reservations = HostReservations(tmp_path)
    release = reservations.reserve(90 * GIB)
    assert _share(tmp_path, 80 * GIB) == 0
    release()


@pytest.mark.parametrize("kind", ["writable by others", "a file", "a link"])
def test_reservations_are_not_shared_when_the_directory_could_be_anybodys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    directory = tmp_path / "shared"
    if kind == "a file":
        directory.touch()
    elif kind == "a link":
        directory.symlink_to(tmp_path)
    else:
        directory.mkdir()
        directory.chmod(0o777)
    with HostReservations(directory).planning():
        pass
    (record,) = caplog.records
    assert (record.levelno, record.getMessage().split()[0]) == (
        logging.WARNING,
        "reservations_not_shared",
    )


def test_others_are_read_when_a_file_among_them_is_no_reservation(tmp_path: Path) -> None:
    (tmp_path / "x.reservation").write_text("nonsense")
    release = HostReservations(tmp_path).reserve(10 * GIB)
    assert _share(tmp_path, 100 * GIB) < 91 * GIB
    release()
