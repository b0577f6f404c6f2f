// One channel to a scheduler: typed calls by the descriptors of the protos, and their end.

import {
  fromBinary,
  type DescMessage,
  type DescMethodBiDiStreaming,
  type DescMethodServerStreaming,
  type DescMethodUnary,
  type MessageInitShape,
  type MessageShape,
} from "@bufbuild/protobuf";
import * as grpc from "@grpc/grpc-js";

import { metadataOf, type ApiKey } from "./api-key.js";
import { encode } from "./encoding.js";
import { ClientClosed, errorOfCall, InvalidRequest, ServerUnreachable } from "./errors.js";

const MIB = 1024 * 1024;
const CHANNEL_OPTIONS: grpc.ChannelOptions = {
  "grpc.max_send_message_length": 64 * MIB,
  "grpc.max_receive_message_length": 64 * MIB,
  // Pings find a peer that is gone without a word.
  "grpc.keepalive_time_ms": 10_000,
  "grpc.keepalive_timeout_ms": 5_000,
  // A server that is back is to be found at once, not after gRPC's patience of minutes.
  "grpc.initial_reconnect_backoff_ms": 100,
  "grpc.max_reconnect_backoff_ms": 1000,
  "grpc.dns_min_time_between_resolutions_ms": 500,
  "grpc.enable_http_proxy": 0,
  // Trying again is ours.
  "grpc.enable_retries": 0,
  // What one client closes is not kept open by another.
  "grpc.use_local_subchannel_pool": 1,
  // Of several schedulers any is the first, so that clients are spread.
  "grpc.service_config": JSON.stringify({
    loadBalancingConfig: [{ pick_first: { shuffleAddressList: true } }],
  }),
};
const SEVERAL = /^(\d{1,3}\.){3}\d{1,3}:\d{1,5}(,(\d{1,3}\.){3}\d{1,3}:\d{1,5})+$/;

type Responses<O extends DescMessage> = AsyncGenerator<MessageShape<O>, void, void>;

/** A stream both ways. */
export interface BidiCall<O extends DescMessage> {
  /** Sends a message that is encoded already; the transport keeps what the server does not take yet. */
  send(message: Buffer): void;
  /** Throws a SplitserveError. */
  readonly responses: Responses<O>;
}

/** A signal that is aborted by the caller's, and when the client is closed. */
export interface Scope {
  readonly signal: AbortSignal;
  /** Lets go of the caller's signal. */
  end(): void;
}

/** How a connection is made. */
export interface ConnectionOptions {
  readonly connectTimeoutMs: number;
  /** Plain text without. */
  readonly credentials: grpc.ChannelCredentials | undefined;
  /** Sent with every call. */
  readonly apiKey: ApiKey | undefined;
}

/** What is open is in `Scope`s: who closes the connection ends them all. */
export class Connection {
  readonly #unreachable: string;
  readonly #connectTimeoutMs: number;
  readonly #apiKey: ApiKey | undefined;
  readonly #client: grpc.Client;
  readonly #scopes = new Set<AbortController>();
  #hasConnected = false;
  #isClosed = false;

  /** Throws InvalidRequest if the API key cannot be one, or the addresses make no sense. */
  constructor(address: string, options: ConnectionOptions) {
    const { connectTimeoutMs, credentials, apiKey } = options;
    metadataOf(apiKey);
    this.#unreachable = unreachable(address, credentials !== undefined);
    this.#connectTimeoutMs = connectTimeoutMs;
    this.#apiKey = apiKey;
    const given = credentials ?? grpc.credentials.createInsecure();
    this.#client = new grpc.Client(targetOf(address), given, CHANNEL_OPTIONS);
  }

  /** Ends what is open with ClientClosed. */
  close(): void {
    if (this.#isClosed) return;
    this.#isClosed = true;
    for (const controller of this.#scopes) controller.abort(closed());
    this.#client.close();
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
    const deadline = Date.now() + this.#connectTimeoutMs;
    while (!this.#hasConnected) {
      signal.throwIfAborted();
      const state = this.#client.getChannel().getConnectivityState(true);
      if (state === grpc.connectivityState.TRANSIENT_FAILURE) {
        throw new ServerUnreachable(this.#unreachable);
      }
      if (state === grpc.connectivityState.READY) this.#hasConnected = true;
      else await this.#stateChange(state, deadline, signal);
    }
  }

  async #stateChange(
    state: grpc.connectivityState,
    deadline: number,
    signal: AbortSignal,
  ): Promise<void> {
    const { promise, resolve, reject } = deferred();
    const abort = (): void => reject(signal.reason);
    signal.addEventListener("abort", abort, { once: true });
    this.#client.getChannel().watchConnectivityState(state, deadline, (error?: Error) => {
      if (error === undefined) resolve();
      else reject(new ServerUnreachable(`${this.#unreachable}; waited too long`));
    });
    try {
      await promise;
    } finally {
      signal.removeEventListener("abort", abort);
    }
  }

  /** Throws a SplitserveError, or the reason of `signal`. */
  async unary<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: MessageInitShape<I>,
    outer?: AbortSignal,
  ): Promise<MessageShape<O>> {
    const message = encode(method.input, request);
    const { signal, end } = this.scope(outer);
    try {
      await this.ready(signal);
      const options = { deadline: Date.now() + this.#connectTimeoutMs };
      const call = this.#startServerStream(method, message, options);
      for await (const response of this.#responses<O>(call, signal)) return response;
      throw new ServerUnreachable("the call ended without an answer");
    } finally {
      end();
    }
  }

  /** Throws InvalidRequest at once if `request` cannot be encoded. */
  serverStream<I extends DescMessage, O extends DescMessage>(
    method: DescMethodServerStreaming<I, O>,
    request: MessageInitShape<I>,
    signal: AbortSignal,
    timeoutMs?: number,
  ): Responses<O> {
    const message = encode(method.input, request);
    const options = timeoutMs === undefined ? {} : { deadline: Date.now() + timeoutMs };
    return this.#responses(this.#startServerStream(method, message, options), signal);
  }

  bidi<I extends DescMessage, O extends DescMessage>(
    method: DescMethodBiDiStreaming<I, O>,
    signal: AbortSignal,
  ): BidiCall<O> {
    const call = this.#client.makeBidiStreamRequest(
      pathOf(method),
      same,
      decoder(method.output),
      metadataOf(this.#apiKey),
    );
    return {
      send: (message) => void call.write(message),
      responses: this.#responses(call, signal),
    };
  }

  #startServerStream<O extends DescMessage>(
    method: DescMethodUnary<DescMessage, O> | DescMethodServerStreaming<DescMessage, O>,
    message: Buffer,
    options: grpc.CallOptions,
  ): grpc.ClientReadableStream<MessageShape<O>> {
    const path = pathOf(method);
    return this.#client.makeServerStreamRequest(
      path,
      same,
      decoder(method.output),
      message,
      metadataOf(this.#apiKey),
      options,
    );
  }

  async *#responses<O extends DescMessage>(
    call: AsyncIterable<MessageShape<O>> & ResponseStream,
    signal: AbortSignal,
  ): Responses<O> {
    const cancel = (): void => call.cancel();
    // A call that nobody reads any more may still report its end.
    call.on("error", () => undefined);
    signal.addEventListener("abort", cancel, { once: true });
    try {
      signal.throwIfAborted();
      for await (const response of call) {
        signal.throwIfAborted();
        yield response;
      }
    } catch (error) {
      signal.throwIfAborted();
      throw errorOfCall(error);
    } finally {
      signal.removeEventListener("abort", cancel);
      call.cancel();
    }
  }
}

interface ResponseStream {
  cancel(): void;
  on(event: "error", listener: () => void): unknown;
}

/** As gRPC names it. Throws InvalidRequest. */
function targetOf(address: string): string {
  if (!address.includes(",") || address.startsWith("ipv4:")) return address;
  if (SEVERAL.test(address)) return `ipv4:${address}`;
  throw new InvalidRequest(
    `the address ${address} cannot be used: of several each is an IPv4 address with a port; ` +
      "dns:name:port is all addresses of a name",
  );
}

/** What is known when there is no connection: gRPC does not say whether somebody was there. */
function unreachable(address: string, isSecure: boolean): string {
  return isSecure
    ? `cannot connect to ${address} with TLS: no server answers, or it wants plain text, or another certificate`
    : `cannot connect to ${address} in plain text: no server answers, or it wants TLS`;
}

function closed(): ClientClosed {
  return new ClientClosed("the client is closed");
}

function pathOf(method: { parent: { typeName: string }; name: string }): string {
  return `/${method.parent.typeName}/${method.name}`;
}

/** Messages are encoded before a call begins, so that what cannot be encoded is no broken call. */
function same(message: Buffer): Buffer {
  return message;
}

function decoder<O extends DescMessage>(schema: O): (bytes: Buffer) => MessageShape<O> {
  return (bytes) => fromBinary(schema, bytes);
}

function deferred(): {
  promise: Promise<void>;
  resolve: () => void;
  reject: (why: unknown) => void;
} {
  let resolve!: () => void;
  let reject!: (why: unknown) => void;
  const promise = new Promise<void>((done, fail) => ([resolve, reject] = [done, fail]));
  return { promise, resolve, reject };
}
