// Errors of the client.
//
// SplitserveError
// ├── ServerUnreachable        no connection, or it broke and did not come back in time
// ├── ClientClosed             `close` was called while the request ran, or before
// ├── DeadlineExceeded         the timeout given with the request has passed
// ├── InvalidRequest           the request is refused as it stands; `reason` says for what
// ├── CallerUnknown            no credential was given, or one that is not valid
// ├── CallerNotAllowed         the credential is valid, and not for this
// ├── RequestIdInUse           an unfinished request has this id
// ├── RequestUnknown           no unfinished request has this id
// ├── TokenizerUnavailable     the server offers no tokenizer
// ├── QueueFull                too many requests wait; again after `retryDelayMs`
// ├── QuotaExceeded            a limit of the caller's tenant; again after `retryDelayMs`
// ├── StreamNotRead            the server kept no more of what was not read; goes on by itself
// ├── ModelNotReady            no executor has registered yet; again after a pause
// ├── ModelChanged             another model is served than the prompt was encoded for
// ├── Draining                 the server is shutting down; try elsewhere
// ├── RequestFailed            an accepted request failed alone
// │   └── DeadlineUnreachable  it was ended early, since its scheduling deadline could not be met
// └── ServerFault              a fault of the server; its log has the details

import { anyUnpack } from "@bufbuild/protobuf/wkt";
import type { Duration } from "@bufbuild/protobuf/wkt";
import { fromBinary } from "@bufbuild/protobuf";
import { status, type Metadata } from "@grpc/grpc-js";

import { ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import { StatusSchema } from "./gen/google/rpc/status_pb.js";

const DOMAIN = "splitserve";
const DETAILS_KEY = "grpc-status-details-bin";
const SCHEDULERS_KEY = "schedulers";
// Of what a server names no more are looked at.
const MAX_NAMED = 8;

/** What an error may have besides its message. */
export interface ErrorDetails {
  readonly reason?: string;
  readonly retryDelayMs?: number | undefined;
  /** With DRAINING. */
  readonly schedulers?: readonly string[] | undefined;
  readonly cause?: unknown;
}

/** Base of all errors of this package. */
export class SplitserveError extends Error {
  /** One of the server's reasons (scheduler.proto has the list), or empty. */
  readonly reason: string;
  /** When to try again, if the server says so. */
  readonly retryDelayMs: number | undefined;

  constructor(message: string, details: ErrorDetails = {}) {
    super(message, details.cause === undefined ? undefined : { cause: details.cause });
    this.name = new.target.name;
    this.reason = details.reason ?? "";
    this.retryDelayMs = details.retryDelayMs;
  }
}

/** No connection, or it broke and did not come back in time. */
export class ServerUnreachable extends SplitserveError {}
/** The client was closed. */
export class ClientClosed extends SplitserveError {}
/** The timeout given with the request has passed. */
export class DeadlineExceeded extends SplitserveError {}
/** The request is refused as it stands, by the server or before it was sent. */
export class InvalidRequest extends SplitserveError {}
/** No credential was given, or one that is not valid. */
export class CallerUnknown extends SplitserveError {}
/** The credential is valid, and not for this. */
export class CallerNotAllowed extends SplitserveError {}
/** An unfinished request has this id. */
export class RequestIdInUse extends SplitserveError {}
/** No unfinished request has this id. */
export class RequestUnknown extends SplitserveError {}
/** The server offers no tokenizer. */
export class TokenizerUnavailable extends SplitserveError {}
/** Too many requests wait. */
export class QueueFull extends SplitserveError {}
/** A limit of the caller's tenant. */
export class QuotaExceeded extends SplitserveError {}
/** The server ended a stream that was not read; what it had brought can be continued. */
export class StreamNotRead extends SplitserveError {}
/** No executor has registered yet. */
export class ModelNotReady extends SplitserveError {}
/** Another model is served than the prompt was encoded for. */
export class ModelChanged extends SplitserveError {}
/** The server is shutting down. */
export class Draining extends SplitserveError {
  /** Addresses that it names as those of others; not all of them are believed. */
  readonly schedulers: readonly string[];

  constructor(message: string, details: ErrorDetails = {}) {
    super(message, details);
    this.schedulers = details.schedulers ?? [];
  }
}
/** An accepted request failed alone. */
export class RequestFailed extends SplitserveError {}
/** The request could not meet its scheduling deadline any more, and was ended early. */
export class DeadlineUnreachable extends RequestFailed {}
/** A fault of the server. */
export class ServerFault extends SplitserveError {}

type ErrorClass = typeof SplitserveError;

const ERROR_OF_REASON: ReadonlyMap<string, ErrorClass> = new Map<string, ErrorClass>([
  ["PROMPT_EMPTY", InvalidRequest],
  ["PROMPT_TOO_LONG", InvalidRequest],
  ["TOKEN_OUT_OF_RANGE", InvalidRequest],
  ["SAMPLING_PARAMS_INVALID", InvalidRequest],
  ["SCHEDULING_PARAMS_INVALID", InvalidRequest],
  ["NEVER_FITS_KV_CACHE", InvalidRequest],
  ["FEATURE_UNSUPPORTED", InvalidRequest],
  ["REQUEST_ID_INVALID", InvalidRequest],
  ["SESSION_PROTOCOL", InvalidRequest],
  ["DRAIN_TIMEOUT_INVALID", InvalidRequest],
  ["MESSAGE_UNDECODABLE", InvalidRequest],
  ["MESSAGE_TOO_LARGE", InvalidRequest],
  ["CALLER_UNKNOWN", CallerUnknown],
  ["CALLER_NOT_ALLOWED", CallerNotAllowed],
  ["REQUEST_ID_IN_USE", RequestIdInUse],
  ["REQUEST_UNKNOWN", RequestUnknown],
  ["TOKENIZER_UNAVAILABLE", TokenizerUnavailable],
  ["QUEUE_FULL", QueueFull],
  ["QUOTA_EXCEEDED", QuotaExceeded],
  ["STREAM_NOT_READ", StreamNotRead],
  ["MODEL_NOT_READY", ModelNotReady],
  ["MODEL_CHANGED", ModelChanged],
  ["DRAINING", Draining],
  ["DEADLINE_UNREACHABLE", DeadlineUnreachable],
]);

const ERROR_OF_CODE: ReadonlyMap<status, ErrorClass> = new Map<status, ErrorClass>([
  [status.UNAVAILABLE, ServerUnreachable],
  // Without a reason these are not the server's word: the call was cut on the way, and which of
  // them gRPC then reports depends on what it was about to do.
  [status.CANCELLED, ServerUnreachable],
  [status.INTERNAL, ServerUnreachable],
  [status.UNKNOWN, ServerUnreachable],
  [status.DEADLINE_EXCEEDED, DeadlineExceeded],
  [status.INVALID_ARGUMENT, InvalidRequest],
  [status.UNAUTHENTICATED, CallerUnknown],
  [status.PERMISSION_DENIED, CallerNotAllowed],
  // gRPC itself refuses a message that is much too large.
  [status.RESOURCE_EXHAUSTED, InvalidRequest],
]);

/** The error for what a server says in-band; an unknown reason gives RequestFailed. */
export function errorOfReason(
  reason: string,
  message: string,
  retryDelay?: Duration,
  schedulers?: readonly string[],
): SplitserveError {
  const kind = ERROR_OF_REASON.get(reason) ?? RequestFailed;
  return new kind(message || "the request failed", {
    reason,
    retryDelayMs: milliseconds(retryDelay),
    schedulers,
  });
}

/** The error for a failed call: by its reason; where there is none, by its code. */
export function errorOfCall(failure: unknown): SplitserveError {
  if (failure instanceof SplitserveError) return failure;
  if (!isCallFailure(failure)) return new ServerUnreachable(String(failure), { cause: failure });
  const said = readDetails(failure.metadata);
  const details = { ...said, cause: failure };
  if (said.reason === "") {
    const kind = ERROR_OF_CODE.get(failure.code) ?? ServerFault;
    const message = failure.details || "the server says no more";
    return new kind(`${status[failure.code] ?? failure.code}: ${message}`, details);
  }
  const fallback = failure.code === status.INVALID_ARGUMENT ? InvalidRequest : ServerFault;
  return new (ERROR_OF_REASON.get(said.reason) ?? fallback)(failure.details, details);
}

interface CallFailure {
  readonly code: status;
  readonly details: string;
  readonly metadata?: Metadata;
}

function isCallFailure(failure: unknown): failure is CallFailure {
  return failure instanceof Error && "code" in failure && typeof failure.code === "number";
}

interface Said {
  reason: string;
  retryDelayMs?: number | undefined;
  schedulers?: readonly string[];
}

/** What the details say, of any gRPC server; bytes that are none say nothing. */
function readDetails(metadata: Metadata | undefined): Said {
  const [bytes] = metadata?.get(DETAILS_KEY) ?? [];
  const said: Said = { reason: "" };
  if (!(bytes instanceof Uint8Array)) return said;
  try {
    for (const detail of fromBinary(StatusSchema, bytes).details) {
      const info = anyUnpack(detail, ErrorInfoSchema);
      if (info?.domain === DOMAIN) {
        said.reason = info.reason;
        const named = info.metadata[SCHEDULERS_KEY] ?? "";
        said.schedulers = named.split(",", MAX_NAMED).filter((address) => address !== "");
      }
      const retry = anyUnpack(detail, RetryInfoSchema);
      if (retry !== undefined) said.retryDelayMs = milliseconds(retry.retryDelay);
    }
  } catch {
    return { reason: "" };
  }
  return said;
}

function milliseconds(duration: Duration | undefined): number | undefined {
  return duration && Number(duration.seconds) * 1000 + duration.nanos / 1e6;
}
