"""Who calls, where credentials are asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

from scheduler_service.callers.api_keys import caller_with_key
from scheduler_service.callers.caller import Caller, TenantLimits
from scheduler_service.callers.refusals import missing, not_valid
from scheduler_service.callers.tenants_file import NO_TENANTS, Tenants
from splitserve_keys.api_key import PREFIX
from splitserve_keys.key_file import Keys
from splitserve_rpc.watched_files import WatchedFiles

MAX_CREDENTIAL_CHARS = 8192


class Authenticator:
    """Knows callers by API keys and tokens, tenants by their file. Implements `Callers`.

    It reads no file and waits for nobody: what it looks at is refreshed by `OpenedCallers`.
    """

    knows_callers = True

    def __init__(
        self,
        keys: WatchedFiles[Keys] | None,
        tenants: WatchedFiles[Tenants] | None,
        identify_token: Callable[[str], Caller] | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """`identify_token`: whose a token is. `now_s`: of the calendar, by which keys expire."""
        self._keys = keys
        self._tenants = tenants
        self._identify_token = identify_token
        self._now_s = now_s

    def identify(self, credential: str) -> Caller:
        if not credential:
            raise missing()
        if len(credential) > MAX_CREDENTIAL_CHARS or not credential.isascii():
            raise not_valid()
        if self._keys is not None and credential.startswith(PREFIX):
            now = datetime.fromtimestamp(self._now_s(), UTC)
            return caller_with_key(self._keys.value, credential, now)
        if self._identify_token is not None:
            return self._identify_token(credential)
        raise not_valid()

    def limits(self, tenant: str) -> TenantLimits:
        tenants = NO_TENANTS if self._tenants is None else self._tenants.value
        return tenants.limits(tenant)
