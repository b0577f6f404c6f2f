from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from splitserve_common import (
    MAX_SCHEDULERS,
    DnsDiscovery,
    FileDiscovery,
    FilesUnusable,
    StaticDiscovery,
    discovery,
)
from tests.support.processes.patience import PATIENCE_S


async def test_list_has_each_address_once_when_it_is_named_twice() -> None:
    assert await discovery("b:2,a:1,b:2").addresses() == ("b:2", "a:1")


@pytest.mark.parametrize(
    "text", ["", "a", "a:1,", "a:b", "a:99999", "dns:", "dns:a", "dns:a:1,b:2"]
)
def test_discovery_is_refused_when_something_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"is invalid; allowed: host:port"):
        discovery(text)


def test_discovery_is_refused_when_it_names_too_many() -> None:
    text = ",".join(f"s{number}:1" for number in range(MAX_SCHEDULERS + 1))
    with pytest.raises(ValueError, match=f"65 schedulers; allowed: 1 to {MAX_SCHEDULERS}"):
        discovery(text)


@pytest.mark.parametrize("host", ["dns", "file"])
async def test_host_may_have_the_name_of_a_form(host: str) -> None:
    found = discovery(f"{host}:50050")
    assert isinstance(found, StaticDiscovery)
    assert await found.addresses() == (f"{host}:50050",)


async def test_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "schedulers"
    path.write_text("# ours\nb:2\n\na:1  # the first\n")
    found = discovery(f"file:{path}")
    assert isinstance(found, FileDiscovery)
    assert await found.addresses() == ("b:2", "a:1")
    path.write_text("c:3\n")
    assert await found.addresses() == ("c:3",)


@pytest.mark.parametrize("content", ["", "# none\n", "a:1\nb\n", "\0"])
async def test_file_holds_what_it_said_when_it_becomes_unusable(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "schedulers"
    path.write_text("a:1\nb:2\n")
    found = discovery(f"file:{path}")
    path.write_text(content)
    assert await found.addresses() == ("a:1", "b:2")
    assert "schedulers_file_unusable" in caplog.text


def test_file_is_refused_when_it_is_unusable_at_first(tmp_path: Path) -> None:
    path = tmp_path / "schedulers"
    with pytest.raises(FilesUnusable, match=r"^file:.*No such file"):
        discovery(f"file:{path}")
    path.write_text("a:1\n" * 20_000)
    with pytest.raises(FilesUnusable, match="has 80000 bytes; allowed: 65536"):
        discovery(f"file:{path}")


class _Names:
    """A name server that answers from a list, and a clock."""

    def __init__(
        self,
        *answers: Sequence[str] | OSError | asyncio.Future[list[str]],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.answers = list(answers)
        self.given: dict[asyncio.Future[list[str]], asyncio.Event] = {}
        self.now_s = 0.0
        self.named = DnsDiscovery("schedulers:50050", self.look_up, lambda: self.now_s, patience_s)

    async def heard(self, answer: asyncio.Future[list[str]]) -> None:
        """Until whoever asked has it."""
        await self.given[answer].wait()
        await asyncio.sleep(0)

    async def look_up(self, host: str, port: int) -> Sequence[str]:
        assert (host, port) == ("schedulers", 50050)
        answer = self.answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        if not isinstance(answer, asyncio.Future):
            return answer
        given = self.given[answer] = asyncio.Event()
        try:
            return await answer
        finally:
            given.set()


async def test_name_stands_for_all_its_addresses() -> None:
    names = _Names(["10.0.0.2", "10.0.0.1", "fd00::1", "10.0.0.2"])
    assert names.named.host == "schedulers"
    assert await names.named.addresses() == ("10.0.0.1:50050", "10.0.0.2:50050", "[fd00::1]:50050")


async def test_name_is_looked_up_again_when_the_answer_is_old() -> None:
    names = _Names(["10.0.0.1"], ["10.0.0.2"])
    assert await names.named.addresses() == ("10.0.0.1:50050",)
    names.now_s = 4.9
    assert await names.named.addresses() == ("10.0.0.1:50050",)
    names.now_s = 5.0
    assert await names.named.addresses() == ("10.0.0.2:50050",)


async def test_name_means_what_it_meant_when_it_cannot_be_resolved(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = _Names(["10.0.0.1"], OSError("gone"), OSError("gone"), [])
    for _ in range(4):
        assert await names.named.addresses() == ("10.0.0.1:50050",)
        names.now_s += 5
    logged = [record.getMessage() for record in caplog.records]
    assert logged == [
        "schedulers_not_resolved host=schedulers problem='gone'",
        "schedulers_not_resolved host=schedulers problem='0 schedulers; allowed: 1 to 64'",
    ]


def unanswered() -> asyncio.Future[list[str]]:
    """An answer that is yet to come."""
    return asyncio.get_running_loop().create_future()


async def test_name_keeps_its_addresses_while_its_server_is_slow(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow, again = unanswered(), unanswered()
    names = _Names(["10.0.0.1"], slow, again, patience_s=0.01)
    await names.named.addresses()
    names.now_s += 5
    assert await names.named.addresses() == ("10.0.0.1:50050",)
    names.now_s += 1.9
    # Nobody asks again so soon, or waits.
    assert await names.named.addresses() == ("10.0.0.1:50050",)
    assert len(names.answers) == 1
    assert not caplog.records
    names.now_s += 0.1
    assert await names.named.addresses() == ("10.0.0.1:50050",)
    assert (
        "schedulers_not_resolved host=schedulers problem='the name server does not answer'"
        in caplog.text
    )
    # The second question is answered first, and what comes to the first is old.
    again.set_result(["10.0.0.2"])
    await names.heard(again)
    assert await names.named.addresses() == ("10.0.0.2:50050",)
    slow.set_result(["10.0.0.3"])
    await names.heard(slow)
    assert await names.named.addresses() == ("10.0.0.2:50050",)


async def test_name_is_fresh_while_only_old_questions_are_not_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lost = unanswered()
    names = _Names(["10.0.0.1"], lost, ["10.0.0.2"], ["10.0.0.3"], patience_s=0.01)
    for now_s in (0, 5, 7):
        names.now_s = now_s
        await names.named.addresses()
    caplog.clear()
    # What the server says now it says at once, so it is asked as seldom as ever.
    names.now_s = 11.9
    assert await names.named.addresses() == ("10.0.0.2:50050",)
    names.now_s = 12
    assert await names.named.addresses() == ("10.0.0.3:50050",)
    lost.set_exception(OSError("gone"))
    await names.heard(lost)
    assert not caplog.records


async def test_slow_name_server_is_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    slow = [unanswered() for _ in range(4)]
    names = _Names(["10.0.0.1"], *slow, patience_s=0.01)
    await names.named.addresses()
    names.now_s = 5
    await names.named.addresses()
    for number, question in enumerate(slow[:-1]):
        # Each is answered when the next was asked.
        names.now_s += 2
        await names.named.addresses()
        question.set_result([f"10.0.0.{number + 2}"])
        await names.heard(question)
    assert await names.named.addresses() == ("10.0.0.4:50050",)
    assert [record.message for record in caplog.records] == [
        "schedulers_not_resolved host=schedulers problem='the name server does not answer'"
    ]


async def test_unknown_name_reports_the_answer_of_its_server() -> None:
    first, second = unanswered(), unanswered()
    names = _Names(first, second)
    asking = asyncio.create_task(names.named.addresses())
    await asyncio.sleep(0)
    names.now_s = 2
    again = asyncio.create_task(names.named.addresses())
    await asyncio.sleep(0)
    first.set_exception(OSError("no such name"))
    for each in (asking, again):
        with pytest.raises(OSError, match="dns:schedulers: no such name"):
            await each
    second.set_result(["10.0.0.1"])
    await names.heard(second)
    assert await names.named.addresses() == ("10.0.0.1:50050",)


async def test_name_is_not_resolved_when_no_thread_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    named = DnsDiscovery("localhost:50050")
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(OSError, match="dns:localhost: can't start new thread"):
        await named.addresses()


async def test_name_server_that_says_nothing_is_not_asked_without_end() -> None:
    questions = [unanswered() for _ in range(5)]
    names = _Names(["10.0.0.1"], *questions, patience_s=0.01)
    await names.named.addresses()
    for _ in range(6):
        names.now_s += 5
        assert await names.named.addresses() == ("10.0.0.1:50050",)
    assert len(names.answers) == 1
    questions[0].set_exception(OSError("gone"))
    await names.heard(questions[0])
    assert await names.named.addresses() == ("10.0.0.1:50050",)
    assert names.answers == []


async def test_name_is_asked_again_at_once_when_nothing_is_known() -> None:
    caught = _Names(OSError("gone"), ["10.0.0.1"])
    with pytest.raises(OSError, match="dns:schedulers: gone"):
        await caught.named.addresses()
    assert await caught.named.addresses() == ("10.0.0.1:50050",)


async def test_name_server_is_asked_once_when_many_wait_for_it() -> None:
    answer: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
    asked: list[str] = []

    async def look_up(host: str, _: int) -> Sequence[str]:
        asked.append(host)
        return await answer

    named = DnsDiscovery("schedulers:1", look_up)
    waiting = [asyncio.create_task(named.addresses()) for _ in range(10)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    answer.set_result(["10.0.0.1"])
    assert await asyncio.gather(*waiting) == [("10.0.0.1:1",)] * 10
    assert asked == ["schedulers"]


async def test_name_of_this_machine_is_found_by_the_system() -> None:
    assert "127.0.0.1:7" in await discovery("dns:localhost:7").addresses()


def test_process_ends_when_a_name_server_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, has_ended = threading.Event(), threading.Event()

    def say_nothing(*_: object, **__: object) -> list[object]:
        asked.set()
        has_ended.wait()
        return []

    async def ask_and_leave() -> None:
        asking = asyncio.create_task(DnsDiscovery("schedulers:1").addresses())
        await asyncio.to_thread(asked.wait)
        asking.cancel()

    monkeypatch.setattr(socket, "getaddrinfo", say_nothing)
    running = threading.Thread(target=asyncio.run, args=(ask_and_leave(),), daemon=True)
    running.start()
    running.join(PATIENCE_S)
    was_waiting = running.is_alive()
    has_ended.set()
    assert not was_waiting
