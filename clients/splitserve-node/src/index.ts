// The Node client of splitserve. Token ids cross the API, text does not; README.md says more.

export { credentials } from "@grpc/grpc-js";

export type { ApiKey } from "./api-key.js";
export { Client, type ClientOptions, type Tls } from "./client.js";
export {
  CallerNotAllowed,
  CallerUnknown,
  ClientClosed,
  DeadlineExceeded,
  DeadlineUnreachable,
  Draining,
  InvalidRequest,
  ModelChanged,
  ModelNotReady,
  QueueFull,
  QuotaExceeded,
  RequestFailed,
  RequestIdInUse,
  RequestUnknown,
  ServerFault,
  ServerUnreachable,
  SplitserveError,
  StreamNotRead,
  TokenizerUnavailable,
} from "./errors.js";
export { collectGeneration, type Completion, type Generation } from "./generation.js";
export type { RetryPolicy, Timing } from "./resumption.js";
export type { Session } from "./session.js";
export type { SessionStream } from "./session-stream.js";
export type * from "./types.js";
