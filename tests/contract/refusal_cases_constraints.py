"""Wrong batches with what contract 1.2 added to sampling params."""

from __future__ import annotations

import math

from splitserve.executor.v1 import executor_pb2 as pb
from tests.contract.refusal_case import Case, new_rows, params
from tests.contract.served import VOCAB_SIZE
from tests.support.steps.batches import NewRow

PARAMS = "new_rows.sampling_params[0]"


def bad_words(*sequences: tuple[int, ...]) -> list[pb.TokenSequence]:
    return [pb.TokenSequence(token_ids=tokens) for tokens in sequences]


CONSTRAINT_CASES = [
    Case("NaN bias", "MALFORMED", f"{PARAMS}.logit_bias[3]", params(logit_bias={3: math.nan})),
    Case("infinite bias", "MALFORMED", f"{PARAMS}.logit_bias[3]", params(logit_bias={3: math.inf})),
    Case(
        "allowed outside the vocabulary",
        "TOKEN_OUT_OF_RANGE",
        f"{PARAMS}.allowed_token_ids",
        params(allowed_token_ids=[1, VOCAB_SIZE]),
    ),
    Case(
        "bad word outside the vocabulary",
        "TOKEN_OUT_OF_RANGE",
        f"{PARAMS}.bad_words_token_ids[1]",
        params(bad_words_token_ids=bad_words((1,), (-1,))),
    ),
    Case(
        "empty bad word",
        "MALFORMED",
        f"{PARAMS}.bad_words_token_ids[1]",
        params(bad_words_token_ids=bad_words((1,), ())),
    ),
    Case(
        "bad word of several tokens without a history",
        "MALFORMED",
        "new_rows.history_offsets",
        params(bad_words_token_ids=bad_words((1, 2))),
    ),
    Case(
        "history with bad words of one token",
        "MALFORMED",
        "new_rows.history_offsets",
        new_rows(NewRow(2, history=[1], params={"bad_words_token_ids": bad_words((1,))})),
    ),
]
