"""The gateway answers as vLLM's server did, but for what docs/vllm.md says."""

from __future__ import annotations

import pytest

from tests.clients.exchange import send
from tests.clients.known_differences import outdated, read_table, unknown
from tests.clients.openai_requests import REQUESTS
from tests.clients.record_vllm import recorded_answers
from tests.clients.shape import Difference, differences
from tests.clients.stack import ServedModel
from tests.support.processes.processes import ROOT

DOCS = ROOT / "docs" / "openai.md"
HEADING = "Differences from vLLM's server"


@pytest.fixture(scope="module")
def found(served: ServedModel) -> list[Difference]:
    """All differences between what vLLM said and what we say."""
    return [
        item
        for area, requests in REQUESTS.items()
        for name, theirs in recorded_answers(area).items()
        for item in differences(
            name,
            theirs,
            send(served.base_url, requests[name], served.model),
            facts="sampled" not in name,
        )
    ]


def test_answers_differ_from_those_of_vllm_in_nothing_that_the_docs_do_not_say(
    found: list[Difference],
) -> None:
    known = read_table(DOCS.read_text(), HEADING)

    assert "\n".join(map(str, unknown(found, known))) == ""


def test_docs_say_of_no_difference_that_there_is_not(found: list[Difference]) -> None:
    known = read_table(DOCS.read_text(), HEADING)

    assert outdated(found, known) == []
