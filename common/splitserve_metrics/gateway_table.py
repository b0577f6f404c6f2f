"""Table of the metrics of a gateway."""

from __future__ import annotations

from splitserve_metrics.metric import SECONDS, Kind, Metric

GATEWAY_METRICS: tuple[Metric, ...] = (
    Metric(
        "splitserve_gateway_requests_total",
        Kind.COUNTER,
        "HTTP requests that were answered; `code` is 0 where the client had gone before",
        "of 429: quotas or places are used up; of 5xx: schedulers are away, or a fault; of 0: "
        "clients lose patience",
        ("path", "code"),
    ),
    Metric(
        "splitserve_gateway_request_duration_seconds",
        Kind.HISTOGRAM,
        "From the arrival of a request to the last byte of its answer",
        "long outputs, or the scheduler's times",
        ("path",),
        SECONDS,
    ),
    Metric(
        "splitserve_gateway_time_to_first_byte_seconds",
        Kind.HISTOGRAM,
        "From the arrival of a request to the first byte of the body of its answer",
        "with streams the scheduler's time to the first token, and what the gateway adds",
        ("path",),
        SECONDS,
    ),
    Metric(
        "splitserve_gateway_requests_open",
        Kind.GAUGE,
        "Requests that are being answered",
        "at `--max-concurrent-requests` further ones are refused",
    ),
    Metric(
        "splitserve_gateway_schedulers",
        Kind.GAUGE,
        "Schedulers by readiness, as the gateway sees them",
        "of anything but READY: requests go to the others",
        ("readiness",),
    ),
    Metric(
        "splitserve_gateway_session_requests",
        Kind.GAUGE,
        "Requests that schedulers have for this gateway",
        "more load",
    ),
)
