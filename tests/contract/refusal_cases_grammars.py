"""Wrong batches with what contract 1.3 added to sampling params."""

from __future__ import annotations

from splitserve.executor.v1 import executor_pb2 as pb
from tests.contract.refusal_case import Case, new_rows, params
from tests.support.steps.batches import NewRow

GRAMMAR = "new_rows.sampling_params[0].grammar"
REGEX = pb.Grammar(regex="x")


def choices(*texts: str) -> pb.Grammar:
    return pb.Grammar(choices=pb.Choices(texts=texts))


def _case(name: str, field: str, grammar: pb.Grammar, **others: object) -> Case:
    row = NewRow(2, (5,), history=[1], params={"grammar": grammar, **others})
    return Case(name, "MALFORMED", f"{GRAMMAR}{field}", new_rows(row))


# For an executor that does not announce the feature; without a history it would be malformed.
UNANNOUNCED_GRAMMAR = Case("grammar", "FEATURE_UNSUPPORTED", GRAMMAR, params(grammar=REGEX))

# For one that does.
GRAMMAR_CASES = [
    _case("grammar of no kind", "", pb.Grammar()),
    _case("empty schema", ".json_schema", pb.Grammar(json_schema="")),
    _case("long grammar", ".lark", pb.Grammar(lark="\u00e9" * 32769)),
    _case("no choices", ".choices", choices()),
    _case("empty choice", ".choices", choices("a", "")),
    _case("many choices", ".choices", choices(*["a"] * 1025)),
    _case("long choices", ".choices", choices(*["a" * 100] * 656)),
    _case("grammar with min_tokens", ".regex", REGEX, min_tokens=1),
    _case("grammar with suppressed tokens", ".regex", REGEX, suppressed_token_ids=[2]),
    Case(
        "grammar without a history",
        "MALFORMED",
        "new_rows.history_offsets",
        params(grammar=REGEX),
    ),
]
