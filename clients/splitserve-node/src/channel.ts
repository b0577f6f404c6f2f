// One channel to one scheduler, and its first connection.

import * as grpc from "@grpc/grpc-js";

import { ServerUnreachable } from "./errors.js";

const MIB = 1024 * 1024;
const OPTIONS: grpc.ChannelOptions = {
  "grpc.max_send_message_length": 64 * MIB,
  "grpc.max_receive_message_length": 64 * MIB,
  // Pings find a peer that is gone without a word.
  "grpc.keepalive_time_ms": 10_000,
  "grpc.keepalive_timeout_ms": 5_000,
  // A server that is back is to be found at once, not after gRPC's patience of minutes.
  "grpc.initial_reconnect_backoff_ms": 100,
  "grpc.max_reconnect_backoff_ms": 500,
  "grpc.dns_min_time_between_resolutions_ms": 500,
  "grpc.enable_http_proxy": 0,
  // Trying again is ours.
  "grpc.enable_retries": 0,
  // What one client closes is not kept open by another.
  "grpc.use_local_subchannel_pool": 1,
};

/** How channels are made. */
export interface ChannelOptions {
  /** Plain text without. */
  readonly credentials: grpc.ChannelCredentials | undefined;
  /** What the server's certificate is for, if not the host of the address. */
  readonly tlsName?: string | undefined;
}

export class Channel {
  readonly client: grpc.Client;
  readonly #unreachable: string;
  #hasConnected = false;

  constructor(address: string, { credentials, tlsName }: ChannelOptions) {
    this.#unreachable = unreachable(address, credentials !== undefined);
    const given = credentials ?? grpc.credentials.createInsecure();
    const isNamed = credentials !== undefined && tlsName !== undefined;
    const options = isNamed ? { ...OPTIONS, "grpc.ssl_target_name_override": tlsName } : OPTIONS;
    this.client = new grpc.Client(address, given, options);
  }

  /** Takes no new call; those that run come to their ends. */
  close(): void {
    this.client.close();
  }

  /** Waits for the first connection. Throws ServerUnreachable as soon as it is refused. */
  async ready(signal: AbortSignal, timeoutMs: number): Promise<void> {
    const deadline = Date.now() + timeoutMs;
    while (!this.#hasConnected) {
      signal.throwIfAborted();
      const state = this.client.getChannel().getConnectivityState(true);
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
    this.client.getChannel().watchConnectivityState(state, deadline, (error?: Error) => {
      if (error === undefined) resolve();
      else reject(new ServerUnreachable(`${this.#unreachable}; waited too long`));
    });
    try {
      await promise;
    } finally {
      signal.removeEventListener("abort", abort);
    }
  }
}

/** What is known when there is no connection: gRPC does not say whether somebody was there. */
function unreachable(address: string, isSecure: boolean): string {
  return isSecure
    ? `cannot connect to ${address} with TLS: no server answers, or it wants plain text, or another certificate`
    : `cannot connect to ${address} in plain text: no server answers, or it wants TLS`;
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
