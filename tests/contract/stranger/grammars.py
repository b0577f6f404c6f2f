"""What a row with a grammar may sample, over token ids: the texts of `choices` are "5 9 12"."""

from collections.abc import Collection, Sequence

from splitserve.executor.v1 import executor_pb2 as pb

INVALID = "no tokens"


def allowed_next(
    grammar: pb.Grammar, output: Sequence[int], eos: Collection[int]
) -> set[int] | None:
    """The tokens that may follow `output`; None if none of the texts begins like it."""
    if INVALID in grammar.choices.texts:
        return None
    found: set[int] = set()
    num_kept = 0
    for text in grammar.choices.texts:
        choice = [int(token) for token in text.split()]
        if choice[: len(output)] == list(output):
            num_kept += 1
            found |= set(choice[len(output) : len(output) + 1]) or set(eos)
    return found if num_kept else None
