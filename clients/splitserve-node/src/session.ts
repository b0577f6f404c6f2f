// Many requests over one stream, which is opened again when it breaks.

import type { BidiCall } from "./calls.js";
import { broken, type Connection, type Scope } from "./connection.js";
import { decodeError } from "./decoding.js";
import { ClientClosed, ServerFault, ServerUnreachable, SplitserveError } from "./errors.js";
import {
  SchedulerService,
  type SessionEvent,
  type SessionResponse,
  type SessionResponseSchema,
} from "./gen/splitserve/scheduler/v1/scheduler_pb.js";
import { OpenRequests, type OpenRequest } from "./open-request.js";
import { ResumableRequest } from "./resumable-request.js";
import { Backoff, type RetryPolicy, type Timing } from "./resumption.js";
import { abortMessage, checkSize, submitMessage } from "./session-messages.js";
import { SessionStream, type Outcome } from "./session-stream.js";
import type { RequestOptions, SamplingParams, TokenIds } from "./types.js";

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
 * When the stream breaks it is opened again, and every unfinished request goes on where it was,
 * unless it was aborted. A request for which that takes longer than the retry policy allows fails;
 * the session itself stays usable. The same patience holds for a server that is not there yet.
 */
export class Session {
  readonly #parts: SessionParts;
  readonly #open = new OpenRequests();
  readonly #closing = new AbortController();
  readonly #scope: Scope;
  #call: BidiCall<typeof SessionResponseSchema> | undefined;
  #isRunning = false;
  /** Whether anything has come since the last stream broke. */
  #isRestored = false;

  constructor(parts: SessionParts) {
    this.#parts = parts;
    this.#scope = parts.connection.scope(this.#closing.signal);
  }

  /** Aborts what is unfinished; it gets a Finish that says so. */
  close(): void {
    for (const handle of this.#open.wanted.keys()) this.#open.abort(handle);
    this.#endAborted();
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
    const handle = this.#open.newHandle();
    const stream = new SessionStream(request.requestId, () => this.#abort(handle));
    const leave = (): void => {
      this.#tellAbort(handle);
      this.#end(handle, { error: signal?.reason });
    };
    signal?.addEventListener("abort", leave, { once: true });
    const forget = (): void => signal?.removeEventListener("abort", leave);
    const backoff = new Backoff(policy, timing);
    this.#open.wanted.set(handle, { request, stream, backoff, forget });
    void this.#submit(handle);
    if (!this.#isRunning) void this.#run();
    return stream;
  }

  // -- the stream ---------------------------------------------------------------------------------

  async #run(): Promise<void> {
    this.#isRunning = true;
    const backoff = new Backoff(this.#parts.policy, this.#parts.timing);
    while (this.#open.wanted.size > 0) {
      const lost = await this.#serveStream(backoff);
      const delayMs = backoff.nextDelayMs(lost);
      this.#lose(lost, delayMs);
      if (this.#open.wanted.size > 0) await this.#pause(delayMs);
    }
    this.#isRunning = false;
  }

  /** Ends what does not go on after another `delayMs`. Each request has patience of its own. */
  #lose(lost: SplitserveError, delayMs: number): void {
    this.#endAborted();
    for (const [handle, { pause, backoff, request }] of this.#open.wanted) {
      pause?.abort();
      if (this.#isRestored) backoff.reset();
      if (!request.mayGoOn(lost) || !backoff.lasts(delayMs)) this.#end(handle, { error: lost });
    }
    this.#isRestored = false;
  }

  async #pause(delayMs: number): Promise<void> {
    try {
      await this.#parts.timing.sleep(delayMs, this.#scope.signal);
    } catch (error) {
      for (const handle of this.#open.wanted.keys()) this.#end(handle, { error });
    }
  }

  /** Serves until the stream breaks; returns why it did. */
  async #serveStream(backoff: Backoff): Promise<SplitserveError> {
    const { connection } = this.#parts;
    try {
      this.#call = await connection.bidi(SchedulerService.method.session, this.#scope.signal);
      for (const handle of this.#open.wanted.keys()) void this.#submit(handle);
      for await (const response of this.#call.responses) {
        this.#isRestored = true;
        backoff.reset();
        this.#receive(response);
      }
      return new ServerUnreachable("the session's stream ended");
    } catch (error) {
      return error as SplitserveError;
    } finally {
      this.#call = undefined;
    }
  }

  /** Sends a request over the stream that is open, but for what would end it for all the others. */
  async #submit(handle: number): Promise<void> {
    const call = this.#call;
    const open = this.#open.wanted.get(handle);
    if (call === undefined || open === undefined) return;
    try {
      const message = submitMessage(handle, open.request.message());
      await checkSize(message, this.#parts.connection, this.#scope.signal);
      if (this.#call !== call || this.#open.wanted.get(handle) !== open) return;
      open.sentOver = call;
      call.send(message);
    } catch (error) {
      if (this.#open.wanted.get(handle) === open) this.#end(handle, { error });
    }
  }

  #abort(handle: number): void {
    const open = this.#open.wanted.get(handle);
    if (open === undefined || this.#tellAbort(handle)) return;
    this.#end(handle, { finish: open.request.aborted() });
  }

  /** Aborts a request; whether the server has it, which then says how it ended. */
  #tellAbort(handle: number): boolean {
    const call = this.#call;
    const open = this.#open.abort(handle);
    if (call === undefined || open?.sentOver !== call) return false;
    call.send(abortMessage(handle));
    return true;
  }

  // -- what it brings -----------------------------------------------------------------------------

  #receive({ handles, tokenIds, events }: SessionResponse): void {
    if (handles.length !== tokenIds.length) {
      throw new ServerFault(`${handles.length} handles came with ${tokenIds.length} tokens`);
    }
    for (const [index, handle] of handles.entries()) {
      const open = this.#received(handle);
      const tokenId = tokenIds[index];
      if (open === undefined || tokenId === undefined) continue;
      open.backoff.reset();
      open.request.receiveToken(tokenId);
      open.stream.putPlain(tokenId);
    }
    for (const event of events) this.#receiveEvent(event);
  }

  /** The request that the server has by this handle. */
  #received(handle: number): OpenRequest | undefined {
    const open = this.#open.get(handle);
    return open?.sentOver === this.#call ? open : undefined;
  }

  #receiveEvent({ handle, event }: SessionEvent): void {
    const open = this.#received(handle);
    if (open === undefined) return;
    if (event.case === "rejected") {
      this.#receiveRefusal(handle, open, decodeError(event.value));
      return;
    }
    open.backoff.reset();
    try {
      for (const part of open.request.receive(event)) {
        if (part.type === "finish") this.#end(handle, { finish: part });
        else open.stream.put(part);
      }
    } catch (error) {
      this.#end(handle, { error });
    }
  }

  #receiveRefusal(handle: number, open: OpenRequest, said: SplitserveError): void {
    // What is refused by one that stops is no failure where there is another.
    const refusal = this.#parts.connection.goesOnElsewhere(said) ? broken(said) : said;
    if (!this.#open.wanted.has(handle)) this.#end(handle, { finish: open.request.aborted() });
    else if (open.request.mayGoOn(refusal)) void this.#submitLater(handle, open, refusal);
    else this.#end(handle, { error: refusal });
  }

  async #submitLater(handle: number, open: OpenRequest, refusal: SplitserveError): Promise<void> {
    const pause = new AbortController();
    open.sentOver = undefined;
    open.pause = pause;
    try {
      await this.#parts.abortStale(open.request.requestId, refusal, pause.signal);
      await open.backoff.pause(refusal, pause.signal);
    } catch (error) {
      if (!pause.signal.aborted) this.#end(handle, { error });
    }
    if (!pause.signal.aborted) await this.#submit(handle);
  }

  /** Ends what was aborted, and what no server has any more. */
  #endAborted(): void {
    for (const [handle, { request }] of this.#open.aborted) {
      this.#end(handle, { finish: request.aborted() });
    }
  }

  #end(handle: number, outcome: Outcome): void {
    this.#open.remove(handle)?.stream.end(outcome);
  }
}
