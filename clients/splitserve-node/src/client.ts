// A client of a splitserve scheduler.

import { credentials, type ChannelCredentials } from "@grpc/grpc-js";

import type { ApiKey } from "./api-key.js";
import { Connection } from "./connection.js";
import { decodeExecutor, decodeModel } from "./decoding.js";
import { durationOf } from "./encoding.js";
import { InvalidRequest, RequestIdInUse, ServerUnreachable, SplitserveError } from "./errors.js";
import { AdminService } from "./gen/splitserve/scheduler/v1/admin_pb.js";
import { SchedulerService } from "./gen/splitserve/scheduler/v1/scheduler_pb.js";
import { collectGeneration, type Generation } from "./generation.js";
import { ResumableRequest } from "./resumable-request.js";
import { Backoff, DEFAULT_RETRY, REAL_TIME, type RetryPolicy, type Timing } from "./resumption.js";
import { Session } from "./session.js";
import {
  numCompletions,
  type DrainOptions,
  type DrainedExecutor,
  type ExecutorList,
  type GenerateOptions,
  type GenerationEvent,
  type Model,
  type SamplingParams,
  type TokenIds,
} from "./types.js";

const TOKENIZER_TIMEOUT_MS = 60_000;
const DRAIN_TIMES = "0 to 3600000";

/** Contents of files in PEM. */
export interface Tls {
  /** Who certifies schedulers; the usual authorities without. */
  readonly ca?: Buffer;
  /** Of the client, with `certificate`. */
  readonly key?: Buffer;
  readonly certificate?: Buffer;
}

/** How patient a client is, and how it connects. */
export interface ClientOptions {
  /** For the first connection and for short calls; 5 seconds. */
  readonly connectTimeoutMs?: number;
  /** For streams that broke. */
  readonly retry?: Partial<RetryPolicy>;
  /** With neither this nor `credentials`: plain text. */
  readonly tls?: Tls;
  /** In place of `tls`: `credentials.createSsl(ca, key, certificate)`, or any other. */
  readonly credentials?: ChannelCredentials;
  /** Sent with every call, in plain text where there is no TLS. */
  readonly apiKey?: ApiKey;
  /**
   * Whether a scheduler that stops may name others where streams go on, with the same security; true.
   * docs/security.md says which are believed: with an `apiKey` other hosts only if `tls` has a `ca`.
   */
  readonly followsPeers?: boolean;
  readonly timing?: Timing;
}

/**
 * Talks to a scheduler. Streams survive its death if it comes back at the same address, or if there
 * is another: `one.example:50051,10.0.0.2:50051`, or `dns:name:50051` for all addresses of a name.
 *
 * Every method throws SplitserveError, or the reason of the caller's signal.
 */
export class Client {
  readonly #connection: Connection;
  readonly #retry: RetryPolicy;
  readonly #timing: Timing;

  /** Throws InvalidRequest for options and addresses that make no sense. */
  constructor(address = "127.0.0.1:50051", options: ClientOptions = {}) {
    const { connectTimeoutMs = 5000, apiKey, tls, followsPeers = true } = options;
    this.#retry = { ...DEFAULT_RETRY, ...options.retry };
    this.#timing = options.timing ?? REAL_TIME;
    this.#connection = new Connection(address, {
      connectTimeoutMs,
      credentials: credentialsOf(options),
      isVouched: tls?.ca !== undefined,
      apiKey,
      followsPeers,
      now: this.#timing.now,
    });
  }

  /** Ends the connection; what still runs on it is aborted, and throws ClientClosed. */
  close(): void {
    this.#connection.close();
  }

  /**
   * Streams the tokens of one completion, or several; the last event is a Finish.
   *
   * A stream that breaks is continued where it broke, with the same randomness; with `bestOf` or
   * beam search nothing comes before the end, and it starts over. Leaving the loop aborts the
   * request, and so does `options.signal`.
   */
  async *generate(
    promptTokenIds: TokenIds,
    params: SamplingParams = {},
    options: GenerateOptions = {},
  ): AsyncGenerator<GenerationEvent, void, void> {
    const { timeoutMs, ...rest } = options;
    const request = new ResumableRequest(promptTokenIds, params, rest, this.#timing.now);
    const backoff = new Backoff(this.#retry, this.#timing, timeoutMs);
    const { signal, end } = this.#connection.scope(options.signal);
    try {
      await this.#connection.ready(signal);
      for (;;) {
        let lost: unknown = new ServerUnreachable("the stream ended without a finish");
        try {
          for await (const event of this.#attempt(request, signal, backoff.remainingMs())) {
            backoff.reset();
            yield event;
            if (event.type === "finish") return;
          }
        } catch (error) {
          lost = error;
        }
        if (!(lost instanceof SplitserveError && request.mayGoOn(lost))) throw lost;
        await this.#abortStale(request.requestId, lost, signal);
        await backoff.pause(lost, signal);
      }
    } finally {
      end();
    }
  }

  async *#attempt(
    request: ResumableRequest,
    signal: AbortSignal,
    timeoutMs: number | undefined,
  ): AsyncGenerator<GenerationEvent, void, void> {
    const method = SchedulerService.method.generate;
    const responses = this.#connection.serverStream(method, request.message(), signal, timeoutMs);
    for await (const response of responses) yield* request.receive(response.event);
  }

  /** Makes room for a resumption where the server has not noticed yet that a stream broke. */
  async #abortStale(requestId: string, lost: SplitserveError, signal: AbortSignal): Promise<void> {
    if (!(lost instanceof RequestIdInUse)) return;
    try {
      await this.abort(requestId, { signal });
    } catch (error) {
      if (!(error instanceof SplitserveError)) throw error;
    }
  }

  /** The whole of what `generate` streams. */
  async complete(
    promptTokenIds: TokenIds,
    params: SamplingParams = {},
    options: GenerateOptions = {},
  ): Promise<Generation> {
    return collectGeneration(
      this.generate(promptTokenIds, params, options),
      numCompletions(params),
    );
  }

  /** Many requests over one stream; close it when it is no longer used. */
  session(): Session {
    return new Session({
      connection: this.#connection,
      policy: this.#retry,
      timing: this.#timing,
      abortStale: (requestId, lost, signal) => this.#abortStale(requestId, lost, signal),
    });
  }

  /** Ends an unfinished request, whoever sent it. Throws RequestUnknown. */
  async abort(requestId: string, options: { signal?: AbortSignal } = {}): Promise<void> {
    await this.#connection.unary(SchedulerService.method.abort, { requestId }, options.signal);
  }

  /** The model that is served. Throws ModelNotReady. */
  async getModel(options: { signal?: AbortSignal } = {}): Promise<Model> {
    const { getModel } = SchedulerService.method;
    return decodeModel(await this.#connection.unary(getModel, {}, options.signal));
  }

  /** The tokenizer files by name. Throws ModelNotReady, TokenizerUnavailable. */
  async getTokenizerFiles(options: { signal?: AbortSignal } = {}): Promise<Map<string, Buffer>> {
    const { signal, end } = this.#connection.scope(options.signal);
    const pieces = new Map<string, Uint8Array[]>();
    try {
      await this.#connection.ready(signal);
      const { getTokenizer } = SchedulerService.method;
      const responses = this.#connection.serverStream(
        getTokenizer,
        {},
        signal,
        TOKENIZER_TIMEOUT_MS,
      );
      for await (const { fileName, data } of responses) {
        pieces.set(fileName, [...(pieces.get(fileName) ?? []), data]);
      }
    } finally {
      end();
    }
    return new Map([...pieces].map(([name, data]) => [name, Buffer.concat(data)]));
  }

  /** The executors the scheduler knows. */
  async listExecutors(options: { signal?: AbortSignal } = {}): Promise<ExecutorList> {
    const { listExecutors } = AdminService.method;
    const listed = await this.#connection.unary(listExecutors, {}, options.signal);
    const { executors, numUnassignedRequests, numUnfittingRequests } = listed;
    return {
      executors: executors.map(decodeExecutor),
      numUnassignedRequests,
      numUnfittingRequests,
    };
  }

  /**
   * Sends an executor away, and returns when it is gone, however long that takes; no stream notices
   * but by a pause. What runs there may end within `timeoutMs` (without: as the scheduler is told at
   * its start), then it goes on elsewhere. A signal that is aborted changes nothing of that.
   */
  async drainExecutor(address: string, options: DrainOptions = {}): Promise<DrainedExecutor> {
    const { timeoutMs, signal } = options;
    const timeout =
      timeoutMs === undefined ? {} : { timeout: durationOf("timeoutMs", timeoutMs, DRAIN_TIMES) };
    const { drainExecutor } = AdminService.method;
    const request = { address, ...timeout };
    const drained = await this.#connection.unary(drainExecutor, request, signal, Infinity);
    return { numMovedRequests: drained.numMovedRequests, isLost: drained.lost };
  }

  /** Takes an executor back that was sent away: it gets requests again, or may join again. */
  async undrainExecutor(address: string, options: { signal?: AbortSignal } = {}): Promise<void> {
    await this.#connection.unary(AdminService.method.undrainExecutor, { address }, options.signal);
  }
}

/** Throws InvalidRequest. */
function credentialsOf({ tls, credentials: given }: ClientOptions): ChannelCredentials | undefined {
  if (tls === undefined) return given;
  if (given !== undefined) {
    throw new InvalidRequest("tls and credentials are given; allowed: one of them");
  }
  try {
    return credentials.createSsl(tls.ca, tls.key, tls.certificate);
  } catch (error) {
    throw new InvalidRequest(`tls cannot be used: ${error}`, { cause: error });
  }
}
