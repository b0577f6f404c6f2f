"""Checks of a gateway: whether it is reachable and serves the model of its scheduler."""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

from splitserve_cli.checks.cluster import check_clock
from splitserve_cli.checks.connection import TIMEOUT_S
from splitserve_cli.checks.finding import Finding, ok, warning, wrong
from splitserve_client import Model
from splitserve_common import parse_json

_MAX_BYTES = 1 << 20
_DIGEST_CHARS = 12
_MAX_SHOWN_CHARS = 200
# The Date header has whole seconds, and servers update it once a second.
_DATE_S = 2.0


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """Address of a gateway, from a URL without a path.

    `headers`: headers of each request, with the credential if there is one.
    """

    scheme: str
    host: str
    port: int
    ca: Path | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, url: str, ca: Path | None, headers: Mapping[str, str]) -> GatewayAddress:
        """Parses the URL of a gateway. Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--gateway is {url}; allowed: http://HOST:PORT or https://HOST:PORT")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return cls(parts.scheme, parts.hostname, port, ca, headers)

    @property
    def address(self) -> str:
        """Address as `host:port`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class _Answer:
    code: int
    date: str
    body: bytes


def check_gateway(
    gateway: GatewayAddress, model: Model | None, now_s: Callable[[], float] = time.time
) -> list[Finding]:
    """Checks a gateway.

    `model`: the model of the scheduler, if known. Blocks for a few seconds at most.
    """
    name = f"gateway {gateway.address}"
    asked_s = now_s()
    try:
        answer = _get(gateway, "/health/ready")
        findings = [_check_ready(name, answer)]
        if answer.date:
            theirs_s = parsedate_to_datetime(answer.date).timestamp()
            clock = check_clock("clock of the gateway", theirs_s, asked_s, now_s(), _DATE_S)
            findings.append(clock)
        return [*findings, _check_models(gateway, model)]
    except (OSError, ValueError, http.client.HTTPException) as error:
        problem = str(error) or type(error).__name__
        remedy = "check that it is a splitserve gateway, and its log"
        return [wrong(name, problem, "it does not respond as a gateway", remedy)]


def _check_ready(name: str, answer: _Answer) -> Finding:
    if answer.code == http.HTTPStatus.OK:
        return ok(name, "ready")
    body = answer.body.decode(errors="replace")[:_MAX_SHOWN_CHARS]
    meaning = "none of its schedulers accepts requests"
    remedy = "check its --schedulers, its log (upstream_lost), and the scheduler (above)"
    return wrong(name, f"{answer.code}: {body}", meaning, remedy)


def _check_models(gateway: GatewayAddress, model: Model | None) -> Finding:
    name = f"models of {gateway.address}"
    answer = _get(gateway, "/v1/models")
    if answer.code in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN):
        remedy = "give --api-key-file, with a key of the scope generate"
        return wrong(
            name, f"{answer.code}", "the credential is missing, or does not permit this", remedy
        )
    if answer.code != http.HTTPStatus.OK:
        return wrong(name, f"{answer.code}", "it does not report its models", "see its log")
    served = _served(answer.body)
    shown = ", ".join(served) or "none"
    if model is not None and (digest := served.get(model.name)) and digest != model.digest:
        found = f"{model.name} (digest {digest[:_DIGEST_CHARS]})"
        meaning = (
            f"the checked scheduler has the digest {model.digest[:_DIGEST_CHARS]}: the gateway uses"
            " the tokenizer of another model, or other schedulers"
        )
        return wrong(name, found, meaning, "give all executors the same folder; check --schedulers")
    if model is not None and served and model.name not in served:
        meaning = f"the checked scheduler serves {model.name}: the gateway uses another one"
        return warning(name, shown, meaning, "check its --schedulers")
    return ok(name, shown)


def _served(body: bytes) -> dict[str, str]:
    """Returns the digest of each model, empty if not reported. Raises ValueError."""
    content = parse_json(body)
    models = content.get("data", []) if isinstance(content, dict) else None
    if not isinstance(models, list) or not all(isinstance(each, dict) for each in models):
        raise ValueError("/v1/models is not a list of models")
    return {str(each.get("id")): str(each.get("digest", "")) for each in models}


def _get(gateway: GatewayAddress, path: str) -> _Answer:
    connection = _open(gateway)
    try:
        connection.request("GET", path, headers=dict(gateway.headers))
        response = connection.getresponse()
        date = response.getheader("date") or ""
        return _Answer(response.status, date, response.read(_MAX_BYTES))
    finally:
        connection.close()


def _open(gateway: GatewayAddress) -> http.client.HTTPConnection:
    if gateway.scheme == "http":
        return http.client.HTTPConnection(gateway.host, gateway.port, timeout=TIMEOUT_S)
    context = ssl.create_default_context(cafile=None if gateway.ca is None else str(gateway.ca))
    return http.client.HTTPSConnection(
        gateway.host, gateway.port, timeout=TIMEOUT_S, context=context
    )
