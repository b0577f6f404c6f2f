"""Table of the metrics of an executor."""

from __future__ import annotations

from splitserve_metrics.instruments import COUNTS, FINE_SECONDS, SECONDS, Metric, MetricKind

# Actions that several metrics share.
_EXECUTOR_INFO_ACTION = (
    "`withdrawn`, `failing`: "
    "[SplitserveExecutorWithdrawn](operations.md#splitserveexecutorwithdrawn). `late`"
    " or `disconnected` for long: that executor's log and machine. Two streams for "
    "long: a second scheduler uses it. Several digests: an old model"
)
_EXECUTOR_STEPS_ACTION = (
    "other than `ok`: `step_failed`, `batch_refused` or `forward_failed` in the executor's log"
)
_EXECUTOR_STEPS_IN_FLIGHT_ACTION = (
    "the time of the running step keeps growing: "
    "[SplitserveStepHangs](operations.md#splitservestephangs)"
)
_GATEWAY_REQUESTS_ACTION = (
    "5xx: [SplitserveGatewayErrors](operations.md#splitservegatewayerrors). Code 0: "
    "clients disconnect, first tokens are late. First bytes far later than the "
    "scheduler's first tokens: the gateway's core is full, start another"
)
_GATEWAY_REQUESTS_OPEN_ACTION = "at `--max-concurrent-requests`: another gateway, or a higher limit"

EXECUTOR_METRICS: tuple[Metric, ...] = (
    Metric(
        "splitserve_executor_info",
        MetricKind.GAUGE,
        "1, with labels for the served model",
        "nothing; several models or digests in one fleet are a mistake",
        ("model", "digest", "dtype", "contract"),
        action=_EXECUTOR_INFO_ACTION,
    ),
    Metric(
        "splitserve_executor_compute_is_fastest",
        MetricKind.GAUGE,
        "1 if the fastest code available for the model computes it, 0 if slower code does",
        "0: the executor's log says why at start, and so does `splitserve info`",
        ("compute",),
        action=(
            "0: the model runs in slower code than it could. `splitserve info` gives the "
            "reason, most often no C++ compiler"
        ),
    ),
    Metric(
        "splitserve_executor_steps_total",
        MetricKind.COUNTER,
        "Answered batches by status",
        "anything but ok: steps fail, or schedulers change",
        ("status",),
        action=_EXECUTOR_STEPS_ACTION,
    ),
    Metric(
        "splitserve_executor_step_duration_seconds",
        MetricKind.HISTOGRAM,
        "Duration of the phases of a step: queue (receipt to start), move (blocks), forward, "
        "sample",
        "queue: steps wait for the one before, as intended; forward: large steps or a slow "
        "device; move: much is swapped; sample: logprobs, penalties, grammars",
        ("phase",),
        FINE_SECONDS,
        action=(
            "`plan` above a millisecond per step: [another scheduler](operations.md#several-"
            "schedulers). `round_trip` far above `compute`: CPU for the executor's machine. "
            "`queue` of the executor is intended. `move`: more device blocks. `sample`: "
            "request fewer logprobs"
        ),
    ),
    Metric(
        "splitserve_executor_step_rows",
        MetricKind.HISTOGRAM,
        "Rows of a step",
        "more requests share a step",
        buckets=COUNTS,
        action=(
            "at their limits: `--max-num-seqs`, `--max-num-batched-tokens` "
            "([sizing](operations.md))"
        ),
    ),
    Metric(
        "splitserve_executor_output_tokens_total",
        MetricKind.COUNTER,
        "Sampled tokens",
        "more load",
        action=(
            "load. If an executor computes far more than clients get, steps are recomputed: "
            "`steps_total`"
        ),
    ),
    Metric(
        "splitserve_executor_draft_tokens_total",
        MetricKind.COUNTER,
        "Draft tokens of the draft model that the model verified, by outcome; none without "
        "`--draft-model`",
        "mostly rejected: drafts cost more than they save, and become fewer by themselves",
        ("outcome",),
        action=(
            "mostly `rejected`: `--speculation off`, or no `--draft-model`. Drafts that do "
            "not pay become fewer by themselves"
        ),
    ),
    Metric(
        "splitserve_executor_row_failures_total",
        MetricKind.COUNTER,
        "Rows that failed in steps that succeeded",
        "requests end with ROW_FAILED or are recomputed: the scheduler's log says why",
        action=_EXECUTOR_STEPS_ACTION,
    ),
    Metric(
        "splitserve_executor_calls_refused_total",
        MetricKind.COUNTER,
        "RPCs that ended with an error of splitserve",
        "CALLER_UNKNOWN, CALLER_NOT_ALLOWED: the caller is no scheduler of this cluster; "
        "STREAM_SUPERSEDED: two schedulers use this executor",
        ("reason",),
        action="by reason, [what each means](operations.md)",
    ),
    Metric(
        "splitserve_executor_steps_in_flight",
        MetricKind.GAUGE,
        "Batches that are not yet answered",
        "at the scheduler's `--pipeline-depth`: the device never waits, as intended",
        action=_EXECUTOR_STEPS_IN_FLIGHT_ACTION,
    ),
    Metric(
        "splitserve_executor_step_running_seconds",
        MetricKind.GAUGE,
        "Age of the oldest batch that is not yet answered",
        "a step hangs: the device or driver does not answer, or the process is stopped",
        action=_EXECUTOR_STEPS_IN_FLIGHT_ACTION,
    ),
    Metric(
        "splitserve_executor_streams",
        MetricKind.GAUGE,
        "Open streams of schedulers",
        "above 1 for more than a moment: two schedulers use this executor",
        action=_EXECUTOR_INFO_ACTION,
    ),
    Metric(
        "splitserve_executor_pool_blocks",
        MetricKind.GAUGE,
        "KV blocks of the executor, used or free",
        "more memory for KV",
        ("pool",),
        action="compare with [sizing](operations.md)",
    ),
)


# -- Table of the metrics of a gateway -------------------------------------------------------------

GATEWAY_METRICS: tuple[Metric, ...] = (
    Metric(
        "splitserve_gateway_requests_total",
        MetricKind.COUNTER,
        "Answered HTTP requests; `code` is 0 where the client left first",
        "429: quotas or concurrency limits are reached; 5xx: schedulers are unavailable, or a bug;"
        " 0: clients disconnect",
        ("path", "code"),
        action=_GATEWAY_REQUESTS_ACTION,
    ),
    Metric(
        "splitserve_gateway_request_duration_seconds",
        MetricKind.HISTOGRAM,
        "Time from a request's arrival to the last byte of its answer",
        "long outputs, or the scheduler's times",
        ("path",),
        SECONDS,
        action=_GATEWAY_REQUESTS_ACTION,
    ),
    Metric(
        "splitserve_gateway_time_to_first_byte_seconds",
        MetricKind.HISTOGRAM,
        "Time from a request's arrival to the first byte of the answer's body",
        "with streams the scheduler's time to the first token, and what the gateway adds",
        ("path",),
        SECONDS,
        action=_GATEWAY_REQUESTS_ACTION,
    ),
    Metric(
        "splitserve_gateway_requests_open",
        MetricKind.GAUGE,
        "Requests being answered",
        "at `--max-concurrent-requests`: further ones are refused",
        action=_GATEWAY_REQUESTS_OPEN_ACTION,
    ),
    Metric(
        "splitserve_gateway_schedulers",
        MetricKind.GAUGE,
        "Schedulers by readiness, as seen by the gateway",
        "anything but READY: requests go to the others",
        ("readiness",),
        action="other than READY: that scheduler's readiness",
    ),
    Metric(
        "splitserve_gateway_session_requests",
        MetricKind.GAUGE,
        "Requests of this gateway that schedulers process",
        "more load",
        action=_GATEWAY_REQUESTS_OPEN_ACTION,
    ),
)
