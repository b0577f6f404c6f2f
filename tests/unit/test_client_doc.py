"""docs/client.md has every reason that a client may meet, with its status."""

from __future__ import annotations

import re
from pathlib import Path

from splitserve_rpc import CODE_OF_REASON

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "client.md").read_text()
ROW = re.compile(r"^\| `([A-Z_]+)` \| ([A-Z_]+|in a `finish`)[ ,]", re.MULTILINE)
PROTO = (ROOT / "protos" / "splitserve" / "scheduler" / "v1" / "scheduler.proto").read_text()


def test_client_doc_maps_every_reason_to_its_status() -> None:
    statuses = {name: status for name, status in ROW.findall(DOCUMENT) if "finish" not in status}

    assert [reason for reason in CODE_OF_REASON if f"`{reason}`" not in DOCUMENT] == []
    assert statuses == {reason: CODE_OF_REASON[reason].name for reason in statuses}


def test_client_doc_has_the_reasons_of_the_proto() -> None:
    comments = PROTO.split("syntax = ")[0].split("# Lengths")[0]
    reasons = set(
        re.findall(r"^//\s+(?:[A-Z_]+\s+)?([A-Z]+(?:_[A-Z]+)+)\s{2,}", comments, re.MULTILINE)
    )

    assert reasons - {name for name, _ in ROW.findall(DOCUMENT)} == set()
    assert {"DRAINING", "INVALID_LOGITS"} & reasons
