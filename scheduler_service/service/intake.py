"""Intake of requests: checks a client's message, and decodes it into a request and admission."""

from __future__ import annotations

import secrets
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

from scheduler_service.adapters import AdapterUnknown
from scheduler_service.callers import (
    Admission,
    Caller,
    Callers,
    Quotas,
    Scope,
    TenantLimits,
    check_model,
    check_prompt,
    check_request,
)
from scheduler_service.driver import Driver
from scheduler_service.request_limits import RequestName, check_lengths
from scheduler_service.scheduler.engine.planning import max_len_of
from scheduler_service.scheduler.values import EncoderFeatures, Feature, Request, SchedulerConfig
from scheduler_service.streams import (
    Keeping,
    SamplingDecoder,
    check_names,
    decode_keeping,
    decode_resumed,
    decode_scheduling_params,
    decode_token_ids,
    digest_of_message,
)
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_contract import DomainError

MAX_REQUEST_ID_CHARS = 128


@dataclass(frozen=True, slots=True)
class AcceptedRequest:
    """Decoded request, the admission on which it may be submitted, and how its output is kept."""

    request: Request
    admission: Admission
    keeping: Keeping | None = None


class Intake:
    """Checks requests against the limits of their callers, and decodes them.

    A scheduler process has one intake, which holds the quotas of all tenants.
    """

    def __init__(self, cluster: Driver, callers: Callers) -> None:
        self._cluster = cluster
        self._callers = callers
        self._sampling = SamplingDecoder()
        self.quotas = Quotas(callers.limits, cluster.now_ns)

    def name(self, caller: Caller, request_id: str, field: str = "request_id") -> RequestName:
        """Returns the name of the request that `caller` calls `request_id`.

        Raises DomainError(REQUEST_ID_INVALID) if the id in `field` is too long.
        """
        if len(request_id) > MAX_REQUEST_ID_CHARS:
            raise DomainError(
                "REQUEST_ID_INVALID",
                f"{field} has {len(request_id)} characters; allowed: {MAX_REQUEST_ID_CHARS}",
            )
        return RequestName(request_id, caller.tenant if self._callers.knows_callers else None)

    def accept(self, message: api.GenerateRequest, caller: Caller) -> AcceptedRequest:
        """Checks and decodes a request. Raises DomainError; nothing has changed then.

        To be called while the driver accepts requests. The cheapest checks come first. A request
        that resumes kept output ends the earlier one, even if it is refused then.
        """
        config = self._cluster.served.largest_config
        assert config is not None, "the driver accepts requests"
        tenant = self._tenant(message, caller)
        limits = self._callers.limits(tenant)
        self._check_model(message.model_digest, limits, tenant)
        check_prompt(message, limits, tenant)
        check_lengths(message, config)
        name = self.name(caller, message.request_id or secrets.token_hex(16))
        keeping = self._keeping(message, caller, tenant)
        num_prompt_tokens = len(message.prompt_token_ids) + len(message.encoder_token_ids)
        if message.encoder_features:
            num_prompt_tokens += config.max_encoder_tokens or 0
        charge = self.quotas.charge(tenant, num_prompt_tokens, _num_resumed_tokens(message))
        request = self._decode(message, name, tenant)
        check_request(request, limits, tenant)
        self._choose_adapter(request)
        _limit_output(request, limits.max_output_tokens, config)
        return AcceptedRequest(request, Admission(name, charge, caller=caller.name), keeping)

    def _keeping(self, message: api.GenerateRequest, caller: Caller, tenant: str) -> Keeping | None:
        """Returns how the output of a request is kept; adds the output that the request resumes.

        Raises DomainError.
        """
        if not message.HasField("kept_output"):
            return None
        key = self.name(caller, message.kept_output.key, "kept_output.key").key
        keeping = decode_keeping(message, key)
        if keeping.resumes:
            self._cluster.end_kept(key)
            found = self._cluster.kept_outputs.find(keeping, tenant, digest_of_message(message))
            for index, token_ids in enumerate(found):
                message.resume_sequences.add(index=index, token_ids=token_ids.tolist())
        return keeping

    def looking_at_adapter(self, message: api.GenerateRequest) -> AbstractAsyncContextManager[None]:
        """Reads the files of the adapter that a request names, which is accepted in the block."""
        return self._cluster.adapters.looking(message.adapter)

    def _choose_adapter(self, request: Request) -> None:
        """Replaces the name of a registered adapter by that of its present version.

        Executors may have adapters of their own, whose names only they know. Raises DomainError.
        """
        adapter, adapters = request.scheduling.adapter, self._cluster.adapters
        if not adapter:
            return
        try:
            reference = adapters.reference(adapter)
        except AdapterUnknown:
            served = self._cluster.served
            if served.has_feature(Feature.ADAPTERS):
                return
            if served.has_feature(Feature.ADAPTER_LOADING) or not adapters.is_empty:
                raise
            return
        request.scheduling = replace(request.scheduling, adapter=reference)

    def _tenant(self, message: api.GenerateRequest, caller: Caller) -> str:
        """Returns the tenant that the request is for.

        The message may name the tenant if callers need no credential, or if the caller has the
        scope TENANTS. Raises DomainError(SCHEDULING_PARAMS_INVALID).
        """
        if not self._callers.knows_callers:
            return message.tenant
        if Scope.TENANTS not in caller.scopes or not message.tenant:
            return caller.tenant
        check_names(message)
        return message.tenant

    def _check_model(self, digest: str, limits: TenantLimits, tenant: str) -> None:
        model = self._cluster.served.model
        if model is None:
            return
        check_model(limits, tenant, model.name)
        if digest and digest != model.digest:
            raise DomainError(
                "MODEL_CHANGED",
                f"model_digest is {digest[:64]!r}; the served model has {model.digest}",
            )

    def _decode(self, message: api.GenerateRequest, name: RequestName, tenant: str) -> Request:
        params = message.sampling_params
        sampling = self._sampling.decode(params)
        sampling.check_sequences()
        # A drawn seed is not negative; a seed from the client may be any int64.
        seed = params.seed if params.HasField("seed") else secrets.randbits(63)
        return Request.create(
            name.key,
            decode_token_ids(message.prompt_token_ids),
            sampling,
            arrival=self._cluster.next_arrival(),
            seed=seed,
            resume_token_ids=decode_resumed(message, sampling),
            scheduling=decode_scheduling_params(message, self._cluster.now_ns(), tenant),
            encoder_token_ids=decode_token_ids(message.encoder_token_ids),
            encoder_features=self._features(message),
        )

    def _features(self, message: api.GenerateRequest) -> EncoderFeatures | None:
        config = self._cluster.served.largest_config
        if not message.encoder_features or config is None:
            return None
        return EncoderFeatures(message.encoder_features, config.max_encoder_tokens or 0)


def _num_resumed_tokens(message: api.GenerateRequest) -> int:
    return len(message.resume_token_ids) + sum(
        len(sequence.token_ids) for sequence in message.resume_sequences
    )


def _limit_output(request: Request, most: int | None, config: SchedulerConfig) -> None:
    """Sets `max_tokens` of a request without it to `most`, the limit of its tenant.

    A request that reaches the maximum length before that is left as it is.
    """
    if most is None or request.params.max_tokens is not None:
        return
    if request.sequence.num_prompt_tokens + most < max_len_of(request, config):
        request.params = replace(request.params, max_tokens=most)
