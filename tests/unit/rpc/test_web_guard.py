"""Which hosts and origins may ask a listener that knows no callers."""

from __future__ import annotations

import pytest

from splitserve_common import WebGuard

GUARD = WebGuard(("api.example.org", "*.example.net"), ("https://page.example",))
NAVIGATES = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


def status_of(guard: WebGuard, method: str = "GET", **fields: str) -> int:
    """200 if the request passes."""
    headers = [
        (name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in fields.items()
    ]
    refusal = guard.refusal(method, headers)
    return 200 if refusal is None else refusal.status


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.0.0.1:8000", "10.1.2.3:80", "[::1]", "[::1]:8000", "[fe80::1%eth0]"),
        *("localhost", "LOCALHOST:8000", "localhost.", "a.localhost", "gateway:8000", "my_host"),
        *("host.docker.internal:8000", "printer.local", "scheduler.ns.svc.cluster.local:9100"),
        *("api.example.org", "API.example.org:443", "api.example.org.", "a.b.example.net"),
    ],
)
def test_guard_lets_pass_addresses_and_names_that_no_page_has(host: str) -> None:
    assert status_of(GUARD, host=host) == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "evil.example.", "127.0.0.1.evil.example"),
        *("localhost.evil.example", "xapi.example.org", "api.example.org.evil.example"),
        *("example.net", "evilexample.net", "", " ", ":8000", "local.evil.example", "127.1"),
    ],
)
def test_guard_refuses_hosts_that_a_page_may_have(host: str) -> None:
    assert status_of(GUARD, host=host) == 400
    assert status_of(WebGuard(("*",)), host=host) == 200


def test_guard_refuses_two_hosts_when_one_is_not_allowed() -> None:
    headers = [(b"host", b"localhost"), (b"host", b"evil.example")]
    assert GUARD.refusal("GET", headers) is not None


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, 200),
        ({"origin": "http://localhost:8000"}, 200),
        ({"origin": "http://LOCALHOST:8000"}, 200),
        ({"origin": "https://page.example"}, 200),
        ({"origin": "https://page.example", "sec-fetch-site": "cross-site"}, 200),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        # A proxy that changes Host does not change what the browser has compared.
        ({"origin": "https://public.example", "sec-fetch-site": "same-origin"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "http://localhost:3000"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
        ({"origin": "https://page.example.evil.example"}, 403),
        ({"origin": "https://evil.example", "sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_guard_decides_by_the_page_that_asks(
    fields: dict[str, str], status: int, method: str
) -> None:
    named = {name.replace("-", "_"): value for name, value in fields.items()}
    assert status_of(GUARD, method, host="localhost:8000", **named) == status
    open_to_all = WebGuard(origins=("*",))
    assert status_of(open_to_all, method, host="localhost:8000", **named) == 200


@pytest.mark.parametrize(
    ("method", "changes", "status"),
    [
        ("GET", {}, 200),
        ("HEAD", {}, 200),
        ("POST", {}, 403),
        ("GET", {"sec-fetch-dest": "iframe"}, 403),
        ("GET", {"sec-fetch-mode": "cors"}, 403),
    ],
)
def test_guard_allows_links_but_not_subresources(
    method: str, changes: dict[str, str], status: int
) -> None:
    fields = {"sec-fetch-site": "cross-site", **NAVIGATES, **changes}
    named = {name.replace("-", "_"): value for name, value in fields.items()}
    assert status_of(GUARD, method, host="localhost", **named) == status


def test_refusal_names_the_header_its_value_and_what_is_allowed() -> None:
    host = GUARD.refusal("GET", [(b"host", b"evil.example")])
    assert host is not None
    assert host.message == (
        "host is 'evil.example'; allowed: an IP address, a name without a dot or of .internal, "
        ".local, .localhost, api.example.org, *.example.net; --allowed-hosts allows more"
    )
    origin = GUARD.refusal("POST", [(b"host", b"a"), (b"origin", b"x" * 10**6)])
    assert origin is not None
    assert origin.message.startswith("origin is 'xxx")
    assert "https://page.example" in origin.message
    assert len(origin.message) < 300
