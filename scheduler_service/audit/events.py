"""What an audit log tells: names, numbers and reasons. No field has content of a request.

Fields are JSON's, by these names; docs/security.md explains them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestAdmitted:
    """A request was taken. `adapter`: empty for none. `max_tokens`: None where it named none."""

    caller: str
    tenant: str
    request_id: str
    num_prompt_tokens: int
    max_tokens: int | None
    num_sequences: int
    model: str
    adapter: str


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """A request was not taken. `limit`: of the tenant, if that is why; empty otherwise.

    Counted as `CallerRefused` is, of one caller for one reason and limit; `tenant` and `request_id`
    are those of the first.
    """

    caller: str
    tenant: str
    request_id: str
    reason: str
    limit: str
    num_times: int = 1


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A request that was taken is over. `reason`: as its finish says, or why it had none.

    `num_output_tokens`: that were computed here, without those that it was resumed with.
    """

    tenant: str
    request_id: str
    reason: str
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class CallerRefused:
    """Somebody may not do what they tried, `num_times` from that peer.

    The first time is told at once, further ones in the same second together, where all but the
    port of the peer is the same. `caller`: whose credential or certificate it was, if one is known.
    """

    method: str
    peer: str
    reason: str
    caller: str = ""
    num_times: int = 1


@dataclass(frozen=True, slots=True)
class OperatorCalled:
    """A method for operators was called, and answered. `caller`: as of `CallerRefused`."""

    method: str
    peer: str
    caller: str


@dataclass(frozen=True, slots=True)
class ExecutorRegistered:
    """An executor is connected and gets requests."""

    address: str
    executor_epoch: int
    model: str


@dataclass(frozen=True, slots=True)
class ExecutorRefused:
    """An executor that wanted to register may not; counted as `CallerRefused` is."""

    address: str
    peer: str
    reason: str
    num_times: int = 1


@dataclass(frozen=True, slots=True)
class ExecutorLost:
    """An executor gets no more requests; those it had go on elsewhere."""

    address: str
    executor_epoch: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class ExecutorWithdrawn:
    """An executor computes wrongly, as others show; its requests go on elsewhere.

    It gets none until it has computed a probe.
    """

    address: str
    executor_epoch: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class RequestQuarantined:
    """Executors were lost during steps of a request, and it is tried alone from now on.

    If one more is, it is over: `RequestEnded` has the reason EXECUTOR_LOST_REPEATEDLY.
    """

    tenant: str
    request_id: str


@dataclass(frozen=True, slots=True)
class ExecutorDrained:
    """An executor was sent away by an operator, or wanted to go, and is gone."""

    address: str
    executor_epoch: int


@dataclass(frozen=True, slots=True)
class KeysReloaded:
    """The file of API keys says something else; ids of keys, `changed`: revoked, for one."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EventsDropped:
    """So many events are not in the log: they came faster than they could be written."""

    num_events: int


AuditEvent = (
    RequestAdmitted
    | RequestRefused
    | RequestEnded
    | CallerRefused
    | OperatorCalled
    | ExecutorRegistered
    | ExecutorRefused
    | ExecutorLost
    | ExecutorWithdrawn
    | RequestQuarantined
    | ExecutorDrained
    | KeysReloaded
    | EventsDropped
)
