"""Scopes of a credential."""

from __future__ import annotations

import enum


class Scope(enum.Enum):
    """Purposes of a credential, as scheduler.proto specifies under "Callers"."""

    GENERATE = "generate"
    GATEWAY = "gateway"
    TENANTS = "tenants"
    OPERATOR = "operator"
