"""Upstream schedulers: discovery, model and readiness of each, and requests that outlive one."""

from splitserve_gateway.upstreams.adapter_lists import AdapterLists, Listed
from splitserve_gateway.upstreams.fleet import Fleet
from splitserve_gateway.upstreams.upstream import ChatRules, ServedByScheduler, Upstream
from splitserve_gateway.upstreams.upstream_request import UpstreamRequest

__all__ = [
    "AdapterLists",
    "ChatRules",
    "Fleet",
    "Listed",
    "ServedByScheduler",
    "Upstream",
    "UpstreamRequest",
]
