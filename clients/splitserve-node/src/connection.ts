// The calls of a client: to which scheduler they go, where they go on, and their end.

import type {
  DescMessage,
  DescMethodBiDiStreaming,
  DescMethodServerStreaming,
  DescMethodUnary,
  MessageInitShape,
  MessageShape,
} from "@bufbuild/protobuf";

import { discover, listed, type Discovery } from "./addresses.js";
import { metadataOf, type ApiKey } from "./api-key.js";
import * as calls from "./calls.js";
import type { BidiCall, CallOptions, Responses } from "./calls.js";
import { Channel, type ChannelOptions } from "./channel.js";
import { encode } from "./encoding.js";
import {
  ClientClosed,
  DeadlineExceeded,
  Draining,
  ModelNotReady,
  ServerUnreachable,
  type SplitserveError,
} from "./errors.js";
import { allowed, MAX_HOPS } from "./following.js";
import { Readiness, SchedulerService } from "./gen/splitserve/scheduler/v1/scheduler_pb.js";
import { OneScheduler, Schedulers, type Target } from "./schedulers.js";

const PROBE_TIMEOUT_MS = 2000;

/** A signal that is aborted by the caller's, and when the client is closed. */
export interface Scope {
  readonly signal: AbortSignal;
  /** Lets go of the caller's signal. */
  end(): void;
}

/** How a connection is made. */
export interface ConnectionOptions extends ChannelOptions {
  readonly connectTimeoutMs: number;
  /** Whether an authority of the operator's own certifies whoever is connected to. */
  readonly isVouched: boolean;
  /** Sent with every call. */
  readonly apiKey: ApiKey | undefined;
  /** Whether a scheduler that stops may name others where streams go on. */
  readonly followsPeers: boolean;
  /** Monotonic milliseconds. */
  readonly now: () => number;
}

/** What is open is in `Scope`s: who closes the connection ends them all. */
export class Connection {
  readonly #address: string;
  readonly #options: ConnectionOptions;
  readonly #knowsOthers: boolean;
  readonly #scopes = new Set<AbortController>();
  #target: Target;
  /** What may still run is where we came from. */
  readonly #left: Target[] = [];
  #isClosed = false;

  /** Throws InvalidRequest if the API key cannot be one, or the addresses make no sense. */
  constructor(address: string, options: ConnectionOptions) {
    metadataOf(options.apiKey);
    this.#address = address;
    this.#options = options;
    const discovery = discover(address, options.now);
    this.#knowsOthers = discovery !== undefined;
    this.#target =
      discovery === undefined
        ? new OneScheduler(new Channel(address, options), options.connectTimeoutMs)
        : this.#several(discovery);
  }

  /** Ends what is open with ClientClosed. */
  close(): void {
    if (this.#isClosed) return;
    this.#isClosed = true;
    for (const controller of this.#scopes) controller.abort(closed());
    for (const target of [...this.#left, this.#target]) target.close();
  }

  /** Throws the reason of `outer` if that is aborted already, and ClientClosed. */
  scope(outer?: AbortSignal): Scope {
    outer?.throwIfAborted();
    if (this.#isClosed) throw closed();
    const controller = new AbortController();
    const abort = (): void => controller.abort(outer?.reason);
    outer?.addEventListener("abort", abort, { once: true });
    this.#scopes.add(controller);
    const end = (): void => {
      outer?.removeEventListener("abort", abort);
      this.#scopes.delete(controller);
    };
    return { signal: controller.signal, end };
  }

  /** Waits for the first connection. Throws ServerUnreachable as soon as it is refused. */
  async ready(signal: AbortSignal): Promise<void> {
    await this.#target.choose(signal);
  }

  /** Throws a SplitserveError, or the reason of `outer`. `timeoutMs`: not that of short calls. */
  async unary<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: MessageInitShape<I>,
    outer?: AbortSignal,
    timeoutMs = this.#options.connectTimeoutMs,
  ): Promise<MessageShape<O>> {
    const message = encode(method.input, request);
    const { signal, end } = this.scope(outer);
    const target = this.#target;
    try {
      const channel = await target.choose(signal);
      const options = { ...this.#callOptions(signal), timeoutMs };
      return await calls.unary(channel, method, message, options);
    } finally {
      end();
    }
  }

  /** Throws InvalidRequest, before anything is sent, if `request` cannot be encoded. */
  async *serverStream<I extends DescMessage, O extends DescMessage>(
    method: DescMethodServerStreaming<I, O>,
    request: MessageInitShape<I>,
    signal: AbortSignal,
    timeoutMs?: number,
  ): Responses<O> {
    const message = encode(method.input, request);
    const target = this.#target;
    const channel = await target.choose(signal);
    const options = { ...this.#callOptions(signal), timeoutMs };
    const responses = calls.serverStream(channel, method, message, options);
    yield* this.#followed(responses, target, channel);
  }

  /** Throws a SplitserveError. */
  async bidi<I extends DescMessage, O extends DescMessage>(
    method: DescMethodBiDiStreaming<I, O>,
    signal: AbortSignal,
  ): Promise<BidiCall<O>> {
    const target = this.#target;
    const channel = await target.choose(signal);
    const call = calls.bidi(channel, method, this.#callOptions(signal));
    return { ...call, responses: this.#followed(call.responses, target, channel) };
  }

  #callOptions(signal: AbortSignal): CallOptions {
    return { apiKey: this.#options.apiKey, signal };
  }

  // -- where it goes on ---------------------------------------------------------------------------

  /** Whether calls go on after `error` at a scheduler that is not being stopped. */
  goesOnElsewhere(error: SplitserveError): boolean {
    if (error instanceof ModelNotReady) return this.#target.hasLeftOne;
    return error instanceof Draining && (this.#knowsOthers || this.#placesNamed(error).length > 0);
  }

  /** The schedulers that `error` names and where calls may go on. */
  #placesNamed(error: Draining): string[] {
    const { followsPeers, isVouched, apiKey } = this.#options;
    if (!followsPeers || this.#knowsOthers || this.#left.length >= MAX_HOPS) return [];
    return allowed(this.#address, error.schedulers, {
      hasCredential: apiKey !== undefined,
      isVouched,
    });
  }

  async *#followed<O extends DescMessage>(
    responses: Responses<O>,
    target: Target,
    channel: Channel,
  ): Responses<O> {
    try {
      yield* responses;
    } catch (error) {
      target.noteFailure(channel, error);
      if (error instanceof ModelNotReady && target.hasLeftOne) throw broken(error);
      throw error instanceof Draining ? this.#follow(error, target) : error;
    }
  }

  /**
   * `error`, or that the stream broke, if it goes on elsewhere. `target`: where the call was; all
   * streams there are told the same, and it is one hop.
   */
  #follow(error: Draining, target: Target): SplitserveError {
    if (target !== this.#target || this.#knowsOthers) return broken(error);
    const named = this.#placesNamed(error);
    if (named.length === 0) return error;
    this.#left.push(this.#target);
    const places = listed([...new Set([this.#address, ...named])]);
    this.#target = this.#several(places, this.#address);
    return broken(error);
  }

  #several(discovery: Discovery, stopping?: string): Schedulers {
    const options = { ...this.#options, tlsName: discovery.host };
    const parts = {
      discovery,
      open: (address: string) => new Channel(address, options),
      isServing: (channel: Channel, signal: AbortSignal) => this.#isServing(channel, signal),
      now: options.now,
    };
    return new Schedulers(parts, stopping);
  }

  /** What it says of itself; who answers anything else is asked, and says why. */
  async #isServing(channel: Channel, signal: AbortSignal): Promise<boolean> {
    const timeoutMs = Math.min(this.#options.connectTimeoutMs, PROBE_TIMEOUT_MS);
    await channel.ready(signal, timeoutMs);
    const { getModel } = SchedulerService.method;
    try {
      const message = encode(getModel.input, {});
      const options = { ...this.#callOptions(signal), timeoutMs };
      const model = await calls.unary(channel, getModel, message, options);
      return [Readiness.READY, Readiness.UNSPECIFIED].includes(model.readiness);
    } catch (error) {
      if (error instanceof ServerUnreachable || error instanceof DeadlineExceeded) throw error;
      signal.throwIfAborted();
      return false;
    }
  }
}

function closed(): ClientClosed {
  return new ClientClosed("the client is closed");
}

/** What `error` is where calls go on elsewhere, or soon. */
export function broken(error: SplitserveError): ServerUnreachable {
  return new ServerUnreachable(error.message, { reason: error.reason, cause: error });
}
