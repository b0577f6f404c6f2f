"""A scheduler with made-up tokens that knows who calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc.aio

from splitserve.scheduler.v1 import scheduler_pb2
from splitserve_rpc.domain_error import DomainError
from tests.support.fakes.fake_scheduler import FakeScheduler


def key(tenant: str, *scopes: str, may_use_model: bool = True) -> scheduler_pb2.IdentifyResponse:
    """What is known of a credential, to generate if nothing else is said."""
    return scheduler_pb2.IdentifyResponse(
        knows_callers=True,
        caller=f"key of {tenant}",
        tenant=tenant,
        scopes=scopes or ("generate",),
        may_use_model=may_use_model,
    )


@dataclass
class KnowingScheduler(FakeScheduler):
    """Knows `keys`. `identified`: what it was asked about; `submitted`: whose requests came.

    `answers`: whether it answers who somebody is. `before_accepting` may refuse a request,
    `before_identifying` to say who somebody is.
    """

    keys: dict[str, scheduler_pb2.IdentifyResponse] = field(default_factory=dict)
    identified: list[str] = field(default_factory=list)
    submitted: list[str] = field(default_factory=list)
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    before_accepting: Callable[[str], None] = lambda credential: None
    before_identifying: Callable[[str], None] = lambda credential: None

    def __post_init__(self) -> None:
        self.answers.set()

    def before_submit(self, submit: scheduler_pb2.SessionSubmit) -> None:
        self.submitted.append(submit.credential)
        if submit.credential not in self.keys:
            raise DomainError("CALLER_UNKNOWN", "the credential is not valid")
        self.before_accepting(submit.credential)

    async def Identify(  # noqa: N802
        self, request: scheduler_pb2.IdentifyRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.IdentifyResponse:
        self.identified.append(request.credential)
        await self.answers.wait()
        self.before_identifying(request.credential)
        try:
            return self.keys[request.credential]
        except KeyError:
            raise DomainError("CALLER_UNKNOWN", "the credential is not valid") from None
