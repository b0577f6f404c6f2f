"""The client API over the cluster."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial

import grpc
import grpc.aio

from scheduler_service.cluster import Cluster
from scheduler_service.core.request import Request
from scheduler_service.executors.broken_core import MESSAGE, REASON
from scheduler_service.request_limits import check_lengths
from scheduler_service.streams.client_codec import (
    decode_resumed,
    decode_sampling_params,
    decode_scheduling_params,
    decode_token_ids,
    encode_default_sampling,
    encode_rejection,
)
from scheduler_service.streams.sinks import GenerateStream, RequestSink, SessionStream, client_key
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve.scheduler.v1 import scheduler_pb2_grpc
from splitserve_rpc.domain_error import DomainError

MAX_REQUEST_ID_CHARS = 128
_CHUNK_BYTES = 1024 * 1024

_log = logging.getLogger(__name__)


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Generate, Session, Abort, GetModel, GetTokenizer."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def Generate(
        self, request: api.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[bytes, None]:
        """Streams one completion; the end of the call, however it comes, ends the request."""
        self._cluster.check_accepting()
        stream = GenerateStream(self._cluster.delivery.new_outbox())
        with self._cluster.client_stream(stream):
            accepted = self._decode(request)
            accepted.client_key = client_key(stream.number, 0)
            stream.request_id = accepted.request_id
            self._cluster.submit(accepted, RequestSink(stream, 0))
            while (response := await stream.outbox.get()) is not None:
                yield response

    async def Session(
        self,
        request_iterator: AsyncIterator[api.SessionRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncGenerator[bytes, None]:
        """Multiplexes requests until the client has half-closed and all have ended."""
        stream = SessionStream(self._cluster.delivery.new_outbox())
        with self._cluster.client_stream(stream):
            reader = asyncio.create_task(self._read_session(request_iterator, stream))
            reader.add_done_callback(partial(self._reading_ended, stream))
            try:
                while (response := await stream.outbox.get()) is not None:
                    yield response
            finally:
                reader.cancel()
                await asyncio.wait({reader})

    def _reading_ended(self, stream: SessionStream, reader: asyncio.Task[None]) -> None:
        if reader.cancelled():
            return
        error = reader.exception()
        if error is None:
            stream.half_close()
            return
        if not isinstance(error, DomainError):
            _log.error("session_failed", exc_info=error)
            error = DomainError(REASON, MESSAGE)
        self._cluster.fail_stream(stream, error)

    async def _read_session(
        self, request_iterator: AsyncIterator[api.SessionRequest], stream: SessionStream
    ) -> None:
        async for message in request_iterator:
            if stream.outbox.has_ended:
                return
            match message.WhichOneof("action"):
                case "submit":
                    self._submit(message.submit, stream)
                case "abort":
                    request_id = stream.request_ids.get(message.abort.handle)
                    if request_id is not None:
                        self._cluster.abort(request_id)
                case _:
                    raise DomainError("SESSION_PROTOCOL", "a message has no action")
            # Whoever does not read what was refused cannot have more refused.
            await stream.outbox.wait_for_room()

    def _submit(self, submit: api.SessionSubmit, stream: SessionStream) -> None:
        handle = submit.handle
        if handle in stream.request_ids:
            raise DomainError("SESSION_PROTOCOL", f"handle {handle} is in use in this session")
        try:
            self._cluster.check_accepting()
            request = self._decode(submit.request)
            request.client_key = client_key(stream.number, handle)
            stream.request_ids[handle] = request.request_id
            self._cluster.submit(request, RequestSink(stream, handle))
        except DomainError as error:
            stream.request_ids.pop(handle, None)
            stream.reject(handle, encode_rejection(error))
            self._cluster.delivery.flush([stream])

    async def Abort(
        self, request: api.AbortRequest, context: grpc.aio.ServicerContext
    ) -> api.AbortResponse:
        """Ends a request; its own stream gets the Finish."""
        _check_request_id(request.request_id)
        self._cluster.abort(request.request_id)
        return api.AbortResponse()

    async def GetModel(
        self, request: api.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> api.GetModelResponse:
        """The model of the executors."""
        model = self._cluster.model
        if model is None:
            raise DomainError("MODEL_NOT_READY", "no executor has registered yet")
        return api.GetModelResponse(
            name=model.name,
            digest=model.digest,
            dtype=model.dtype,
            vocab_size=model.vocab_size,
            max_model_len_tokens=self._cluster.max_model_len,
            eos_token_ids=model.eos_token_ids,
            default_sampling_params=encode_default_sampling(
                model.default_sampling_params, model.vocab_size
            ),
            max_message_bytes=self._cluster.max_message_bytes,
            max_num_sequences=self._cluster.max_num_sequences,
        )

    async def GetTokenizer(
        self, request: api.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[api.GetTokenizerResponse]:
        """The tokenizer files in chunks."""
        if self._cluster.model is None:
            raise DomainError("MODEL_NOT_READY", "no executor has registered yet")
        if not self._cluster.tokenizer_files:
            raise DomainError("TOKENIZER_UNAVAILABLE", "the executors offer no tokenizer")
        for name, data in self._cluster.tokenizer_files.items():
            for start in range(0, max(len(data), 1), _CHUNK_BYTES):
                piece = data[start : start + _CHUNK_BYTES]
                yield api.GetTokenizerResponse(file_name=name, data=piece)

    def _check_model(self, digest: str) -> None:
        model = self._cluster.model
        if digest and model is not None and digest != model.digest:
            raise DomainError(
                "MODEL_CHANGED", f"model_digest is {digest[:64]!r}; served is {model.digest}"
            )

    def _decode(self, message: api.GenerateRequest) -> Request:
        """The request, once one is accepted at all. Raises DomainError."""
        config = self._cluster.largest_config
        assert config is not None, "requests are accepted"
        self._check_model(message.model_digest)
        check_lengths(message, config)
        request_id = message.request_id or secrets.token_hex(16)
        _check_request_id(request_id)
        params = message.sampling_params
        sampling = decode_sampling_params(params)
        sampling.check_sequences()
        # A drawn seed is positive, one that is given may be any int64.
        seed = params.seed if params.HasField("seed") else secrets.randbits(63)
        return Request.create(
            request_id,
            decode_token_ids(message.prompt_token_ids),
            sampling,
            arrival=self._cluster.next_arrival(),
            seed=seed,
            resume_token_ids=decode_resumed(message, sampling),
            scheduling=decode_scheduling_params(message, self._cluster.now_ns()),
            encoder_token_ids=decode_token_ids(message.encoder_token_ids),
        )


def _check_request_id(request_id: str) -> None:
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        raise DomainError(
            "REQUEST_ID_INVALID",
            f"request_id has {len(request_id)} characters; allowed: {MAX_REQUEST_ID_CHARS}",
        )
