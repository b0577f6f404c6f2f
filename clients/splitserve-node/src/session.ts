// Many requests over one stream, which is opened again when it breaks.

import type { BidiCall, Connection, Scope } from "./connection.js";
import { decodeError } from "./decoding.js";
import { encode } from "./encoding.js";
import {
  ClientClosed,
  InvalidRequest,
  ServerFault,
  ServerUnreachable,
  SplitserveError,
} from "./errors.js";
import {
  SchedulerService,
  SessionRequestSchema,
  type SessionEvent,
  type SessionResponse,
  type SessionResponseSchema,
} from "./gen/splitserve/scheduler/v1/scheduler_pb.js";
import { ResumableRequest } from "./resumable-request.js";
import { Backoff, type RetryPolicy, type Timing } from "./resumption.js";
import { SessionStream } from "./session-stream.js";
import type { Finish, RequestOptions, SamplingParams, TokenIds } from "./types.js";

// Every server takes a message of this size.
const SMALL_MESSAGE_BYTES = 256 * 1024;
const MAX_HANDLE = 2 ** 31 - 1;

/** An unfinished request as the session keeps it. */
interface Open {
  readonly request: ResumableRequest;
  readonly stream: SessionStream;
  readonly backoff: Backoff;
  /** Lets go of the caller's signal. */
  readonly forget: () => void;
  /** Whether the server has it, over the stream that is open. */
  isSent: boolean;
  /** Ends the pause before it is submitted again. */
  pause?: AbortController | undefined;
}

/** What a session gets from its client. */
export interface SessionParts {
  readonly connection: Connection;
  readonly policy: RetryPolicy;
  readonly timing: Timing;
  /** Makes room for a resumption where the server has not noticed yet that a stream broke. */
  readonly abortStale: (
    requestId: string,
    lost: SplitserveError,
    signal: AbortSignal,
  ) => Promise<void>;
}

/**
 * Submits requests at any time; `close` aborts those that are unfinished.
 *
 * When the stream breaks it is opened again, and every unfinished request goes on where it was.
 * Where that takes longer than the retry policy allows, the requests fail; the session itself stays
 * usable. The same patience holds for a server that is not there yet.
 */
export class Session {
  readonly #parts: SessionParts;
  readonly #open = new Map<number, Open>();
  readonly #closing = new AbortController();
  readonly #scope: Scope;
  #call: BidiCall<typeof SessionResponseSchema> | undefined;
  #isRunning = false;
  #lastHandle = 0;

  constructor(parts: SessionParts) {
    this.#parts = parts;
    this.#scope = parts.connection.scope(this.#closing.signal);
  }

  /** Aborts what is unfinished; it gets a Finish that says so. */
  close(): void {
    for (const [handle, open] of this.#open) this.#finish(handle, open.request.aborted());
    this.#closing.abort(new ClientClosed("the session is closed"));
    this.#scope.end();
  }

  /**
   * Starts a request; see `Client.generate`. Throws ClientClosed, the reason of a signal that is
   * aborted, and InvalidRequest for names that are none; anything else the iterator throws.
   */
  submit(
    prompt: TokenIds,
    params: SamplingParams = {},
    options: RequestOptions = {},
  ): SessionStream {
    const { signal } = options;
    this.#scope.signal.throwIfAborted();
    signal?.throwIfAborted();
    const { policy, timing } = this.#parts;
    const request = new ResumableRequest(prompt, params, options, timing.now);
    const handle = this.#newHandle();
    const stream = new SessionStream(request.requestId, () => this.#abort(handle));
    const leave = (): void => {
      this.#abort(handle);
      this.#end(handle, { error: signal?.reason });
    };
    signal?.addEventListener("abort", leave, { once: true });
    const forget = (): void => signal?.removeEventListener("abort", leave);
    const backoff = new Backoff(policy, timing);
    this.#open.set(handle, { request, stream, backoff, forget, isSent: false });
    void this.#submit(handle);
    if (!this.#isRunning) void this.#run();
    return stream;
  }

  #newHandle(): number {
    do this.#lastHandle = (this.#lastHandle % MAX_HANDLE) + 1;
    while (this.#open.has(this.#lastHandle));
    return this.#lastHandle;
  }

  // -- the stream ---------------------------------------------------------------------------------

  async #run(): Promise<void> {
    this.#isRunning = true;
    const backoff = new Backoff(this.#parts.policy, this.#parts.timing);
    while (this.#open.size > 0) {
      const lost = await this.#serveStream(backoff);
      for (const [handle, open] of this.#open) {
        open.isSent = false;
        open.pause?.abort();
        if (!open.request.mayGoOn(lost)) this.#end(handle, { error: lost });
      }
      if (this.#open.size > 0) await this.#pause(backoff, lost);
    }
    this.#isRunning = false;
  }

  async #pause(backoff: Backoff, lost: unknown): Promise<void> {
    try {
      await backoff.pause(lost as SplitserveError, this.#scope.signal);
    } catch (error) {
      for (const handle of this.#open.keys()) this.#end(handle, { error });
    }
  }

  /** Serves until the stream breaks; returns why it did. */
  async #serveStream(backoff: Backoff): Promise<unknown> {
    const { connection } = this.#parts;
    try {
      await connection.ready(this.#scope.signal);
      this.#call = connection.bidi(SchedulerService.method.session, this.#scope.signal);
      for (const handle of this.#open.keys()) void this.#submit(handle);
      for await (const response of this.#call.responses) {
        backoff.reset();
        this.#receive(response);
      }
      return new ServerUnreachable("the session's stream ended");
    } catch (error) {
      return error;
    } finally {
      this.#call = undefined;
    }
  }

  /** Sends a request over the stream that is open, but for what would end it for all the others. */
  async #submit(handle: number): Promise<void> {
    const call = this.#call;
    const open = this.#open.get(handle);
    if (call === undefined || open === undefined) return;
    try {
      const value = { handle, request: open.request.message() };
      const message = encode(SessionRequestSchema, { action: { case: "submit", value } });
      if (message.length > SMALL_MESSAGE_BYTES) await this.#checkSize(message.length);
      if (this.#call !== call || this.#open.get(handle) !== open) return;
      open.isSent = true;
      call.send(message);
    } catch (error) {
      if (this.#open.get(handle) === open) this.#end(handle, { error });
    }
  }

  /** Throws InvalidRequest. If the server does not say what it takes, it is for it to refuse. */
  async #checkSize(numBytes: number): Promise<void> {
    const { getModel } = SchedulerService.method;
    const asking = this.#parts.connection.unary(getModel, {}, this.#scope.signal);
    const limit = await asking.then(
      (model) => Number(model.maxMessageBytes),
      () => 0,
    );
    if (limit > 0 && numBytes > limit) {
      const message = `the request has ${numBytes} bytes; the server takes at most ${limit}`;
      throw new InvalidRequest(message, { reason: "MESSAGE_TOO_LARGE" });
    }
  }

  #abort(handle: number): void {
    const open = this.#open.get(handle);
    if (open === undefined) return;
    if (open.isSent && this.#call !== undefined) {
      const action = { case: "abort", value: { handle } } as const;
      this.#call.send(encode(SessionRequestSchema, { action }));
    } else {
      this.#finish(handle, open.request.aborted());
    }
  }

  // -- what it brings -----------------------------------------------------------------------------

  #receive({ handles, tokenIds, events }: SessionResponse): void {
    if (handles.length !== tokenIds.length) {
      throw new ServerFault(`${handles.length} handles came with ${tokenIds.length} tokens`);
    }
    for (const [index, handle] of handles.entries()) {
      const open = this.#open.get(handle);
      const tokenId = tokenIds[index];
      if (open === undefined || tokenId === undefined) continue;
      open.backoff.reset();
      open.request.receiveToken(tokenId);
      open.stream.putPlain(tokenId);
    }
    for (const event of events) this.#receiveEvent(event);
  }

  #receiveEvent({ handle, event }: SessionEvent): void {
    const open = this.#open.get(handle);
    if (open === undefined) return;
    if (event.case === "rejected") {
      const refusal = decodeError(event.value);
      if (open.request.mayGoOn(refusal)) void this.#submitLater(handle, open, refusal);
      else this.#end(handle, { error: refusal });
      return;
    }
    open.backoff.reset();
    try {
      for (const part of open.request.receive(event)) {
        if (part.type === "finish") this.#finish(handle, part);
        else open.stream.put(part);
      }
    } catch (error) {
      this.#end(handle, { error });
    }
  }

  async #submitLater(handle: number, open: Open, refusal: SplitserveError): Promise<void> {
    const pause = new AbortController();
    open.isSent = false;
    open.pause = pause;
    try {
      await this.#parts.abortStale(open.request.requestId, refusal, pause.signal);
      await open.backoff.pause(refusal, pause.signal);
    } catch (error) {
      if (!pause.signal.aborted) this.#end(handle, { error });
    }
    if (!pause.signal.aborted) await this.#submit(handle);
  }

  #finish(handle: number, finish: Finish): void {
    this.#end(handle, { finish });
  }

  #end(handle: number, outcome: { finish: Finish } | { error: unknown }): void {
    const open = this.#open.get(handle);
    if (open === undefined) return;
    this.#open.delete(handle);
    open.pause?.abort();
    open.forget();
    open.stream.end(outcome);
  }
}
