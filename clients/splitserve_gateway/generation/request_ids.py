"""What a request is called: to its caller, and to schedulers, so that one is found by the other."""

from __future__ import annotations

import secrets

from splitserve_rpc.log_context import log_context

_PREFIX = "req_"
# Schedulers take 128 characters, of which ours need some.
_MAX_OWN_CHARS = 80


def exchange_id() -> str:
    """Of the HTTP request that is answered: what its x-request-id has after the prefix."""
    context = log_context.get()
    if context is None or not context.request_id.startswith(_PREFIX):
        return secrets.token_hex(16)
    return context.request_id.removeprefix(_PREFIX)


def answer_id(own: str | None) -> str:
    """Of an answer, but for what it begins with. `own`: what its caller calls it, if it does."""
    return own or exchange_id()


def upstream_id(own: str | None, prompt_index: int) -> str:
    """Of the request for one prompt; callers may use their own ids as often as they like.

    `watching/explanation.py` of the scheduler takes it apart.
    """
    parts = [own[:_MAX_OWN_CHARS]] if own else []
    return ".".join([*parts, exchange_id(), str(prompt_index)])
