"""What a credential is for."""

from __future__ import annotations

import enum


class Scope(enum.Enum):
    """What a credential is for; scheduler.proto, "Callers"."""

    GENERATE = "generate"
    GATEWAY = "gateway"
    TENANTS = "tenants"
    OPERATOR = "operator"
