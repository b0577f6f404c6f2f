"""Who serves a request, and by what rules."""

from __future__ import annotations

from dataclasses import dataclass

from splitserve_client import Tokenizer, TokenizerUnavailable
from splitserve_gateway.callers.caller import Caller
from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.grammars.checker import GrammarChecker, TenantChecker
from splitserve_gateway.upstreams.upstream import Served, Upstream


@dataclass(frozen=True, slots=True)
class Serving:
    """The scheduler that was chosen for a request, what it serves, and the gateway's own parts."""

    upstream: Upstream
    served: Served
    config: GatewayConfig
    checker: GrammarChecker
    caller: Caller

    def checker_for(self, user: str | None) -> TenantChecker:
        """What checks grammars of a request that says it is of `user`.

        Where callers are known their tenant takes turns with others, whatever it says.
        """
        return self.checker.of(self.caller.tenant or user or "")

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises TokenizerUnavailable."""
        return tokenizer_of(self.served)


def tokenizer_of(served: Served) -> Tokenizer:
    """Raises TokenizerUnavailable."""
    if served.tokenizer is None:
        raise TokenizerUnavailable(
            f"the model {served.model.name!r} is served without a tokenizer"
            f" ({served.tokenizer_lack or 'its executors offer none'}), so text cannot be read or"
            " written; allowed: POST /v1/completions with a prompt of token ids, whose answer has"
            " token_ids"
        )
    return served.tokenizer
