"""Table of the metrics of a scheduler."""

from __future__ import annotations

from splitserve_metrics.instruments import COUNTS, FINE_SECONDS, SECONDS, Metric, MetricKind

_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
_NOT_ITS_OWN = "more load; compare with the same hour of another day"

# Actions that several metrics share.
_TIME_TO_FIRST_TOKEN_ACTION = (
    "[SplitserveFirstTokensLate](operations.md#splitservefirsttokenslate): if most of"
    " it is queueing, more rows, blocks or executors; else smaller steps"
)
_RECOVERY_ACTION = (
    "[SplitserveExecutorsLost](operations.md#splitserveexecutorslost); "
    "[operations.md](operations.md) lists the parts of a pause"
)
_REQUESTS_ACTION = "by reason, [what each means](operations.md)"
_PROMPT_TOKENS_ACTION = (
    "load. If an executor computes far more than clients get, steps are recomputed: `steps_total`"
)
_TENANT_REQUESTS_ACTION = (
    "load by tenant; quotas and weights ([security.md](security.md#callers-api-keys-"
    "tokens-tenants))"
)
_NUM_REQUESTS_RUNNING_ACTION = (
    "full rows and a lasting queue: more executors. `unfitting`: `splitserve info` "
    "shows what executors can take"
)
_NUM_REQUESTS_SWAPPED_ACTION = "[SplitservePreemptions](operations.md#splitservepreemptions)"
_STEP_ROWS_ACTION = (
    "at their limits: `--max-num-seqs`, `--max-num-batched-tokens` ([sizing](operations.md))"
)
_CLIENT_STREAMS_ACTION = "[SplitserveClientsDoNotRead](operations.md#splitserveclientsdonotread)"

_ADAPTERS_ACTION = (
    "if evictions and waiting requests grow together: a larger `--max-adapters`, or more executors"
)

SCHEDULER_METRICS: tuple[Metric, ...] = (
    # -- Latency of requests -------------------------------------------------------------------
    Metric(
        "splitserve_time_to_first_token_seconds",
        _HISTOGRAM,
        "Time from a request's acceptance to the sending of its first token",
        "requests queue (see queue_time), or prompts are long and steps slow",
        buckets=SECONDS,
        action=_TIME_TO_FIRST_TOKEN_ACTION,
    ),
    Metric(
        "splitserve_inter_token_latency_seconds",
        _HISTOGRAM,
        "Time between tokens of a sequence; tokens that arrive together share it equally",
        "steps are slow or large, or requests are preempted",
        buckets=SECONDS,
        action="[SplitserveTokensSlow](operations.md#splitservetokensslow)",
    ),
    Metric(
        "splitserve_queue_time_seconds",
        _HISTOGRAM,
        "Time from a request's acceptance to the first step that computes a token of it",
        "too few rows, blocks or executors for the load",
        buckets=SECONDS,
        action=_TIME_TO_FIRST_TOKEN_ACTION,
    ),
    Metric(
        "splitserve_request_duration_seconds",
        _HISTOGRAM,
        "Time from a request's acceptance to its end, successful or not",
        "long outputs, or any of the above",
        buckets=SECONDS,
        action=_TIME_TO_FIRST_TOKEN_ACTION,
    ),
    Metric(
        "splitserve_recovery_seconds",
        _HISTOGRAM,
        "Time from the loss of a request's executor to its next token",
        "the lost KV takes long to recompute, or the remaining executors are full",
        buckets=SECONDS,
        action=_RECOVERY_ACTION,
    ),
    # -- Numbers of requests and tokens --------------------------------------------------------
    Metric(
        "splitserve_requests_total",
        _COUNTER,
        "Ended requests by finish or error reason",
        "`stop`, `length`: load; any other reason: the fault that it names",
        ("reason",),
        action=_REQUESTS_ACTION,
    ),
    Metric(
        "splitserve_requests_refused_total",
        _COUNTER,
        "Refused requests, callers and executors by reason",
        "QUEUE_FULL: too little capacity; QUOTA_EXCEEDED: a tenant at its limit; CALLER_UNKNOWN: "
        "wrong keys; others: faulty callers",
        ("reason",),
        action=_REQUESTS_ACTION,
    ),
    Metric(
        "splitserve_calls_refused_total",
        _COUNTER,
        "RPCs that ended with an error of splitserve by reason; a request with an RPC of its "
        "own counts in both",
        "METHOD_UNKNOWN, MESSAGE_UNDECODABLE: callers of other versions, or at the wrong address; "
        "INVARIANT_BROKEN: a bug, see the log; others: as for requests",
        ("reason",),
        action=_REQUESTS_ACTION,
    ),
    Metric(
        "splitserve_prompt_tokens_total",
        _COUNTER,
        "Prompt tokens of accepted requests",
        _NOT_ITS_OWN,
        action=_PROMPT_TOKENS_ACTION,
    ),
    Metric(
        "splitserve_output_tokens_total",
        _COUNTER,
        "Tokens sent to clients",
        _NOT_ITS_OWN,
        action=_PROMPT_TOKENS_ACTION,
    ),
    Metric(
        "splitserve_tenant_requests_total",
        _COUNTER,
        "Ended requests by tenant named in the configuration; `other`: all other tenants",
        "that tenant's load",
        ("tenant",),
        action=_TENANT_REQUESTS_ACTION,
    ),
    Metric(
        "splitserve_tenant_prompt_tokens_total",
        _COUNTER,
        "Prompt tokens of accepted requests by tenant, as above",
        "that tenant's load",
        ("tenant",),
        action=_TENANT_REQUESTS_ACTION,
    ),
    Metric(
        "splitserve_tenant_output_tokens_total",
        _COUNTER,
        "Computed output tokens of ended requests by tenant, as above",
        "that tenant's load",
        ("tenant",),
        action=_TENANT_REQUESTS_ACTION,
    ),
    # -- Current requests and executors --------------------------------------------------------
    Metric(
        "splitserve_num_requests_running",
        _GAUGE,
        "Requests with a row by executor",
        "at `--max-num-seqs`: rows are the bottleneck",
        ("executor",),
        action=_NUM_REQUESTS_RUNNING_ACTION,
    ),
    Metric(
        "splitserve_num_requests_waiting",
        _GAUGE,
        "Requests assigned to an executor that have no row",
        "preempted requests that wait for recomputation",
        ("executor",),
        action=_NUM_REQUESTS_RUNNING_ACTION,
    ),
    Metric(
        "splitserve_num_requests_swapped",
        _GAUGE,
        "Requests whose KV is in the host pool",
        "KV blocks are scarce: fewer rows, or more blocks",
        ("executor",),
        action=_NUM_REQUESTS_SWAPPED_ACTION,
    ),
    Metric(
        "splitserve_num_requests_unassigned",
        _GAUGE,
        "Requests without an executor; `unfitting`: no present executor could ever run them",
        "too few executors; unfitting: an executor with more blocks or features is missing",
        ("fits",),
        action=_NUM_REQUESTS_RUNNING_ACTION,
    ),
    Metric(
        "splitserve_num_executors",
        _GAUGE,
        "Executors by state: serving, late (no answer in time), draining, disconnected, "
        "withdrawn (gets no requests because its steps or rows fail), failing (the same, but "
        "no other executor is left)",
        "late: their machines are overloaded; the log has executor_lost if they stay so; "
        "withdrawn, failing: their devices or drivers are broken, the log has executor_withdrawn",
        ("state",),
        action=(
            "`withdrawn`, `failing`: "
            "[SplitserveExecutorWithdrawn](operations.md#splitserveexecutorwithdrawn). `late`"
            " or `disconnected` for long: that executor's log and machine. Two streams for "
            "long: a second scheduler uses it. Several digests: an old model"
        ),
    ),
    Metric(
        "splitserve_executor_changes_total",
        _COUNTER,
        "Executors that joined, drained, were lost, or were withdrawn because of their results",
        "lost: processes die, hang or are cut off; each costs a recomputation; withdrawn: "
        "they fail work that others can do",
        ("change",),
        action=_RECOVERY_ACTION,
    ),
    Metric(
        "splitserve_requests_quarantined_total",
        _COUNTER,
        "Requests that run alone because executors were lost during their steps",
        "a request, or something that all of them share, kills executors",
        action="the executors' logs show why they died",
    ),
    Metric(
        "splitserve_ready",
        _GAUGE,
        "1 for the current readiness, 0 for the others",
        "anything but READY: see readiness in the operations handbook",
        ("readiness",),
        action="[readiness](operations.md)",
    ),
    # -- Steps ---------------------------------------------------------------------------------
    Metric(
        "splitserve_steps_total",
        _COUNTER,
        "Answered steps by status; need_snapshot, refused and failed steps are computed again",
        "anything but ok: an executor fails; its log says why",
        ("status",),
        action=(
            "other than `ok`: `step_failed`, `batch_refused` or `forward_failed` in the "
            "executor's log"
        ),
    ),
    Metric(
        "splitserve_step_duration_seconds",
        _HISTOGRAM,
        "Duration of the phases of a step: plan (deciding, encoding), round_trip (from "
        "sending to the answer, waiting for the previous step included), move and compute (as"
        " reported by the executor)",
        "plan: the scheduler's core is full; compute: large steps, or a slow executor; round_trip "
        "beyond twice compute: the network, or an overloaded machine",
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
        "splitserve_step_rows",
        _HISTOGRAM,
        "Rows of a step",
        "more requests share a step: more throughput, longer steps",
        buckets=COUNTS,
        action=_STEP_ROWS_ACTION,
    ),
    Metric(
        "splitserve_step_tokens",
        _HISTOGRAM,
        "Input tokens of a step",
        "at `--max-num-batched-tokens`: prompts wait for each other",
        buckets=COUNTS,
        action=_STEP_ROWS_ACTION,
    ),
    # -- KV blocks -----------------------------------------------------------------------------
    Metric(
        "splitserve_kv_blocks",
        _GAUGE,
        "Blocks of a pool by state: blank (free and empty), cached (free and findable), "
        "referenced, deferred (free once the steps in flight are answered)",
        "referenced near all of them: preemptions are next; blank near all: idle",
        ("executor", "pool", "state"),
        action=_NUM_REQUESTS_SWAPPED_ACTION,
    ),
    Metric(
        "splitserve_kv_cache_usage_ratio",
        _GAUGE,
        "Referenced and deferred blocks as a fraction of a pool",
        "near 1: preemptions are next",
        ("executor", "pool"),
        action=_NUM_REQUESTS_SWAPPED_ACTION,
    ),
    Metric(
        "splitserve_prefix_tokens_total",
        _COUNTER,
        "Prompt tokens of requests at admission by source: computed, or cached on the device "
        "or the host",
        "computed: prompts share little, or the cache is too small",
        ("executor", "source"),
        action=(
            "if prompts share prefixes and most tokens are `computed`: more blocks, on the "
            "device or the host"
        ),
    ),
    Metric(
        "splitserve_preemptions_total",
        _COUNTER,
        "Preempted requests; kind: swap or recompute; cause: blocks (none left for the next "
        "token), share (its tenant had more than its share) or urgency (of another request)",
        "blocks: fewer rows or more blocks; urgency: priorities or deadlines cause it",
        ("executor", "kind", "cause"),
        action=_NUM_REQUESTS_SWAPPED_ACTION,
    ),
    Metric(
        "splitserve_draft_tokens_total",
        _COUNTER,
        "Draft tokens that steps verified, by outcome",
        "rejected: they cost more than they save",
        ("executor", "outcome"),
        action=(
            "mostly `rejected`: `--speculation off`, or no `--draft-model`. Drafts become fewer "
            "by themselves while most are rejected"
        ),
    ),
    # -- Adapters --------------------------------------------------------------------------
    Metric(
        "splitserve_adapters",
        _GAUGE,
        "LoRA adapters of an executor; state: loaded or loading",
        "requests name more adapters; at most `--max-adapters`",
        ("executor", "state"),
        action=_ADAPTERS_ACTION,
    ),
    Metric(
        "splitserve_adapter_loads_total",
        _COUNTER,
        "Adapters that an executor was told to load, by outcome: loaded or failed",
        "loaded: more adapters are in use than fit; failed: files are no usable adapter",
        ("executor", "outcome"),
        action="failed: the scheduler's log says why (`adapter_not_loaded`)",
    ),
    Metric(
        "splitserve_adapter_evictions_total",
        _COUNTER,
        "Adapters that an executor removed to load others",
        "more adapters are in use than fit",
        ("executor",),
        action=_ADAPTERS_ACTION,
    ),
    Metric(
        "splitserve_num_requests_waiting_for_adapter",
        _GAUGE,
        "Waiting requests whose adapter no executor has loaded",
        "no adapter slot is free, or adapters take long to load",
        action=_ADAPTERS_ACTION,
    ),
    Metric(
        "splitserve_adapter_requests_total",
        _COUNTER,
        "Accepted requests by adapter; the 100 names seen first, then `other`",
        "more load",
        ("adapter",),
        action="load by adapter",
    ),
    Metric(
        "splitserve_lora_requests_info",
        _GAUGE,
        "Time in seconds since 1970; its labels list the adapters of running and of waiting "
        "requests, and how many can be loaded at once, as Kubernetes' inference extension reads "
        "them",
        "nothing: it is the time",
        ("running_lora_adapters", "waiting_lora_adapters", "max_lora"),
        action="for the extension's endpoint picker (`loraInfoMetric`)",
    ),
    # -- Process -------------------------------------------------------------------------------
    Metric(
        "splitserve_client_streams",
        _GAUGE,
        "Open client streams; a gateway has one for all of its requests",
        "more clients",
        action=_CLIENT_STREAMS_ACTION,
    ),
    Metric(
        "splitserve_unread_bytes",
        _GAUGE,
        "Bytes that clients have not read yet",
        "clients or their networks are slow; streams beyond `--max-unread-mib` end",
        action=_CLIENT_STREAMS_ACTION,
    ),
)
