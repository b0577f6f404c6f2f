"""Output that is kept after its request, for a client that lost its stream (`KeptOutput`)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_service.request_limits import RequestKey
from scheduler_service.scheduler.values import Int32Array, Request
from scheduler_service.streams.client_codec import decode_token_ids
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_contract import DomainError

MAX_KEPT_S = 600
_MAX_TENANT_BYTES = 4 * 2**20
_MAX_BYTES = 64 * 2**20
# Freed at a time, since the tenants have to be sorted for it.
_FREED_BYTES = _MAX_BYTES // 16
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
    """Keys of a tenant's outputs, oldest first, and the size of the outputs."""

    keys: dict[RequestKey, None] = field(default_factory=dict)
    num_bytes: int = 0


class KeptOutputs:
    """Outputs of ended requests, and the unfinished requests whose output will be kept."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._wishes: dict[str, Keeping] = {}
        self._unfinished: dict[RequestKey, str] = {}
        # Outputs by tenant and key, oldest first.
        self._outputs: dict[tuple[str, RequestKey], _Output] = {}
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
        output = self._outputs.get((tenant, keeping.key))
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
        self._outputs[tenant, keeping.key] = output
        of_tenant.keys[keeping.key] = None
        of_tenant.num_bytes += output.num_bytes
        self._num_bytes += output.num_bytes
        self._drop_down_to(tenant, _MAX_TENANT_BYTES)
        if self._num_bytes > _MAX_BYTES:
            self._make_room()

    def _drop_expired(self, now_ns: int) -> None:
        """Drops the oldest outputs while their time is over."""
        while self._outputs:
            oldest, output = next(iter(self._outputs.items()))
            if output.until_ns > now_ns:
                return
            self._drop(*oldest)

    def _make_room(self) -> None:
        """Drops the older half of each of the largest tenants, until `_FREED_BYTES` are free."""
        sizes = {name: each.num_bytes for name, each in self._tenants.items()}
        for tenant in sorted(sizes, key=lambda name: sizes[name], reverse=True):
            self._drop_down_to(tenant, sizes[tenant] // 2)
            if self._num_bytes <= _MAX_BYTES - _FREED_BYTES:
                return

    def _drop_down_to(self, tenant: str, num_bytes: int) -> None:
        """Drops a tenant's oldest outputs until the others have at most `num_bytes`."""
        of_tenant = self._tenants[tenant]
        while of_tenant.num_bytes > num_bytes:
            self._drop(tenant, next(iter(of_tenant.keys)))

    def _drop(self, tenant: str, key: RequestKey) -> None:
        output = self._outputs.pop((tenant, key), None)
        if output is None:
            return
        of_tenant = self._tenants[tenant]
        del of_tenant.keys[key]
        of_tenant.num_bytes -= output.num_bytes
        self._num_bytes -= output.num_bytes
        if not of_tenant.keys:
            del self._tenants[tenant]


def digest_of_request(request: Request) -> bytes:
    """Returns the digest of a request's prompt and encoder input."""
    prompt = request.sequence.token_ids[: request.sequence.num_prompt_tokens]
    encoder, features = request.encoder_token_ids, request.encoder_features
    return _digest(
        prompt,
        decode_token_ids(()) if encoder is None else encoder,
        b"" if features is None else features.data,
    )


def digest_of_message(message: api.GenerateRequest) -> bytes:
    """Returns the same digest of a message."""
    return _digest(
        decode_token_ids(message.prompt_token_ids),
        decode_token_ids(message.encoder_token_ids),
        message.encoder_features,
    )


def _digest(prompt: Int32Array, encoder_token_ids: Int32Array, features: bytes) -> bytes:
    digest = hashlib.sha256(len(prompt).to_bytes(8, "little"))
    for part in (prompt.tobytes(), encoder_token_ids.tobytes(), features):
        digest.update(part)
    return digest.digest()
