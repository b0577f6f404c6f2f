"""Whose turn a request takes, where turns are taken."""

from __future__ import annotations

import pytest

from splitserve_gateway.callers.caller import ANYBODY, Caller
from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.generation.prompts import Serving
from splitserve_gateway.grammars.checker import GrammarChecker


@pytest.mark.parametrize(
    ("caller", "user", "tenant"),
    [
        (ANYBODY, "u", "u"),
        (ANYBODY, None, ""),
        (Caller("key", tenant="a"), "u", "a"),
        (Caller("key", tenant="a"), None, "a"),
        # May speak for tenants.
        (Caller("key"), "u", "u"),
    ],
)
async def test_tenant_is_the_callers_unless_it_may_speak_for_others(
    caller: Caller, user: str | None, tenant: str
) -> None:
    serving = Serving(None, None, GatewayConfig(), GrammarChecker(), caller)  # type: ignore[arg-type]
    assert serving.checker_for(user).tenant == tenant


def test_callers_and_what_they_bring_are_not_shown() -> None:
    assert "secret" not in repr(Caller("secret", tenant="a"))
