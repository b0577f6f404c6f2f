"""Output that is kept after its request, for a client that lost its stream (`KeptOutput`)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from scheduler_service.request_limits import RequestKey
from scheduler_service.scheduler.values import Int32Array, Request
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_contract import DomainError

MAX_KEPT_S = 600
_MAX_TENANT_BYTES = 4 * 2**20
_MAX_BYTES = 64 * 2**20
# Memory of one output beside its tokens.
_OUTPUT_BYTES = 512
_NS_PER_S = 10**9
# Their output is more than tokens, or not streamed.
_UNSUITABLE = ("num_logprobs", "num_prompt_logprobs", "beam_search", "pooling")


@dataclass(frozen=True, slots=True)
class Keeping:
    """Wish to keep the output of a request, checked. `key`: name of the output, in all tenants."""

    key: RequestKey
    duration_ns: int
    resumes: bool
    num_read_tokens: tuple[int, ...]


def decode_keeping(request: api.GenerateRequest, key: RequestKey) -> Keeping:
    """Decodes the wish of a request, whose `kept_output` is set.

    Raises DomainError(SAMPLING_PARAMS_INVALID).
    """
    message, params = request.kept_output, request.sampling_params
    if not message.key:
        raise _unusable("kept_output.key is empty; allowed: 1 to 128 characters")
    unsuitable = [name for name in _UNSUITABLE if params.HasField(name)]
    if params.HasField("best_of") and params.best_of > max(params.n, 1):
        unsuitable.append("best_of")
    if unsuitable:
        raise _unusable(f"kept_output cannot be combined with {unsuitable[0]}")
    if message.resumes and (request.resume_token_ids or request.resume_sequences):
        raise _unusable("kept_output.resumes excludes resume_token_ids and resume_sequences")
    duration_ns = 0
    if message.HasField("duration"):
        duration_ns = message.duration.ToNanoseconds()
        if not 0 < duration_ns <= MAX_KEPT_S * _NS_PER_S:
            raise _unusable(
                f"kept_output.duration is {duration_ns / _NS_PER_S:g} s; allowed: above 0, at most "
                f"{MAX_KEPT_S} s"
            )
    return Keeping(key, duration_ns, message.resumes, tuple(message.num_read_tokens))


def _unusable(message: str) -> DomainError:
    return DomainError("SAMPLING_PARAMS_INVALID", message)


@dataclass(frozen=True, slots=True)
class _Output:
    """Output of an ended request. `token_ids`: of each sequence. `prompt`: digest of the prompt."""

    prompt: bytes
    token_ids: list[Int32Array]
    until_ns: int

    @property
    def num_bytes(self) -> int:
        return _OUTPUT_BYTES + sum(tokens.nbytes for tokens in self.token_ids)


@dataclass(slots=True)
class _OfTenant:
    """Outputs of a tenant by key, oldest first."""

    outputs: dict[RequestKey, _Output] = field(default_factory=dict)
    num_bytes: int = 0


class KeptOutputs:
    """Outputs of ended requests, and the unfinished requests whose output will be kept."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._wishes: dict[str, Keeping] = {}
        self._unfinished: dict[RequestKey, str] = {}
        self._tenants: dict[str, _OfTenant] = {}
        self._num_bytes = 0

    def begin(self, request: Request, keeping: Keeping) -> None:
        """Notes the wish to keep the output of `request`, which is submitted."""
        self._wishes[request.request_id] = keeping
        self._unfinished[keeping.key] = request.request_id

    def end(self, request: Request) -> None:
        """Keeps the output of `request`, which has ended, if that is wished."""
        keeping = self._wishes.pop(request.request_id, None)
        if keeping is None or self._unfinished.get(keeping.key) != request.request_id:
            return
        del self._unfinished[keeping.key]
        if keeping.duration_ns:
            self._add(request, keeping)

    def unfinished(self, key: RequestKey) -> str | None:
        """Returns the id of the unfinished request whose output will be kept under `key`."""
        return self._unfinished.get(key)

    def find(self, keeping: Keeping, tenant: str, prompt: bytes) -> list[Int32Array]:
        """Returns the kept output tokens of each sequence. Raises DomainError(OUTPUT_UNKNOWN).

        `prompt`: digest of the prompt that they must belong to.
        """
        of_tenant = self._tenants.get(tenant)
        output = None if of_tenant is None else of_tenant.outputs.get(keeping.key)
        if output is None or output.prompt != prompt or output.until_ns <= self._now_ns():
            raise DomainError("OUTPUT_UNKNOWN", "no output of this prompt is kept under this key")
        for index, num_read in enumerate(keeping.num_read_tokens):
            kept = len(output.token_ids[index]) if index < len(output.token_ids) else 0
            if num_read > kept:
                message = f"{kept} output tokens of sequence {index} are kept; read: {num_read}"
                raise DomainError("OUTPUT_UNKNOWN", message)
        return output.token_ids

    def _add(self, request: Request, keeping: Keeping) -> None:
        now_ns = self._now_ns()
        self._drop_expired(now_ns)
        # Copied: the arrays have the prompt, too.
        token_ids = [each.token_ids[each.num_prompt_tokens :].copy() for each in request.sequences]
        output = _Output(digest_of_request(request), token_ids, now_ns + keeping.duration_ns)
        if output.num_bytes > _MAX_TENANT_BYTES:
            return
        tenant = request.scheduling.tenant
        self._drop(tenant, keeping.key)
        of_tenant = self._tenants.setdefault(tenant, _OfTenant())
        of_tenant.outputs[keeping.key] = output
        of_tenant.num_bytes += output.num_bytes
        self._num_bytes += output.num_bytes
        while of_tenant.num_bytes > _MAX_TENANT_BYTES:
            self._drop_oldest(tenant)
        while self._num_bytes > _MAX_BYTES:
            self._drop_oldest(max(self._tenants, key=lambda name: self._tenants[name].num_bytes))

    def _drop_expired(self, now_ns: int) -> None:
        for tenant, of_tenant in list(self._tenants.items()):
            while of_tenant.outputs and next(iter(of_tenant.outputs.values())).until_ns <= now_ns:
                self._drop_oldest(tenant)

    def _drop_oldest(self, tenant: str) -> None:
        self._drop(tenant, next(iter(self._tenants[tenant].outputs)))

    def _drop(self, tenant: str, key: RequestKey) -> None:
        of_tenant = self._tenants.get(tenant)
        if of_tenant is None or (output := of_tenant.outputs.pop(key, None)) is None:
            return
        of_tenant.num_bytes -= output.num_bytes
        self._num_bytes -= output.num_bytes
        if not of_tenant.outputs:
            del self._tenants[tenant]


def digest_of_request(request: Request) -> bytes:
    """Returns the digest of a request's prompt and encoder input."""
    prompt = request.sequence.token_ids[: request.sequence.num_prompt_tokens]
    features = request.encoder_features
    return _digest(
        prompt,
        () if request.encoder_token_ids is None else request.encoder_token_ids,
        b"" if features is None else features.data,
    )


def digest_of_message(message: api.GenerateRequest) -> bytes:
    """Returns the same digest of a message."""
    return _digest(message.prompt_token_ids, message.encoder_token_ids, message.encoder_features)


def _digest(
    prompt: Iterable[int] | Int32Array, encoder_token_ids: Iterable[int] | Int32Array, data: bytes
) -> bytes:
    parts = [np.fromiter(tokens, np.int32).tobytes() for tokens in (prompt, encoder_token_ids)]
    digest = hashlib.sha256(len(parts[0]).to_bytes(8, "little"))
    for part in (*parts, data):
        digest.update(part)
    return digest.digest()
