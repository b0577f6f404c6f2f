"""A grammar in protobuf: the messages of the step contract, the client API and the journal."""

from __future__ import annotations

from scheduler_service.core.grammar import Grammar
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve.scheduler.v1 import scheduler_pb2 as api


def encode_grammar(grammar: Grammar, message: executor.Grammar | api.Grammar) -> None:
    """Sets the kind of `message` that `grammar` has."""
    if grammar.kind == "choices":
        message.choices.texts.extend(grammar.texts)
    else:
        setattr(message, grammar.kind, grammar.texts[0])


def decode_grammar(message: api.Grammar) -> Grammar:
    """What `message` says, which is not validated. Raises ValueError if it has no kind."""
    kind = message.WhichOneof("kind")
    if kind is None:
        raise ValueError("grammar has no kind; allowed: json_schema, regex, lark or choices")
    if kind == "choices":
        return Grammar(kind, tuple(message.choices.texts))
    return Grammar(kind, (getattr(message, kind),))
