"""The gateway answers as vLLM's server did, but for what docs/vllm.md says."""

from __future__ import annotations

from tests.clients.exchange import send
from tests.clients.known_differences import outdated, read_table, unknown
from tests.clients.openai_requests import REQUESTS
from tests.clients.record_vllm import recorded_answers
from tests.clients.shape import differences
from tests.clients.stack import ServedModel
from tests.support.processes.forked import ROOT

DOCS = ROOT / "docs" / "vllm.md"
HEADING = "Differences from vLLM's server"


def test_answers_differ_from_those_of_vllm_in_just_what_the_docs_say(served: ServedModel) -> None:
    known = read_table(DOCS.read_text(), HEADING)

    found = [
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

    assert "\n".join(map(str, unknown(found, known))) == ""
    assert outdated(found, known) == []
