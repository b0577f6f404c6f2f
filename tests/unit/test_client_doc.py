"""docs/client.md has every reason that a client may meet, with its status."""

from __future__ import annotations

import re
from pathlib import Path

from splitserve_rpc.errors import CODE_OF_REASON

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "client.md").read_text()
ROW = re.compile(r"^\| `([A-Z_]+)` \| ([A-Z_]+|in a `finish`)[ ,]", re.MULTILINE)
PROTO = (ROOT / "protos" / "splitserve" / "scheduler" / "v1" / "scheduler.proto").read_text()


def test_client_doc_maps_every_reason_to_its_status() -> None:
    statuses = dict(ROW.findall(DOCUMENT))
    between_services = set(
        re.findall(r"`([A-Z_]+)`", DOCUMENT.split("clients never see")[0][-300:])
    )
    expected = {
        reason: code.name
        for reason, code in CODE_OF_REASON.items()
        if reason not in between_services
    }

    in_band = {reason for reason, status in statuses.items() if status == "in a `finish`"}
    assert {reason: statuses[reason] for reason in statuses.keys() - in_band} == expected


def test_client_doc_has_the_reasons_of_the_proto() -> None:
    comments = PROTO.split("syntax = ")[0].split("# Lengths")[0]
    reasons = set(
        re.findall(r"^//\s+(?:[A-Z_]+\s+)?([A-Z]+(?:_[A-Z]+)+)\s{2,}", comments, re.MULTILINE)
    )

    assert reasons - {name for name, _ in ROW.findall(DOCUMENT)} == set()
    assert {"DRAINING", "INVALID_LOGITS"} & reasons
