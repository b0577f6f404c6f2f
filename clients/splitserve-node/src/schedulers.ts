// The schedulers that a client knows: calls go to one of them, as long as that serves.

import type { Discovery } from "./addresses.js";
import type { Channel } from "./channel.js";
import { Draining, ServerUnreachable } from "./errors.js";
import { ask, type Answers } from "./probes.js";

// What a scheduler said of itself holds for so long.
const FRESH_MS = 1000;

/** Where calls go. */
export interface Target {
  /** The channel for one call; waits for its first connection. Throws SplitserveError. */
  choose(signal: AbortSignal): Promise<Channel>;
  /** A call over `channel` failed. */
  noteFailure(channel: Channel, error: unknown): void;
  /** Whether it went away from one that stops: where it is now executors may be on their way. */
  readonly hasLeftOne: boolean;
  /** Ends what runs. */
  close(): void;
}

/** What schedulers are to those who look for one. */
export interface SchedulersParts {
  readonly discovery: Discovery;
  open(address: string): Channel;
  /** Whether it serves. Throws SplitserveError if it cannot be reached, and takes bounded time. */
  isServing(channel: Channel, signal: AbortSignal): Promise<boolean>;
  now(): number;
  shuffle?(addresses: string[]): string[];
}

/** There is no other. */
export class OneScheduler implements Target {
  readonly hasLeftOne = false;
  readonly #channel: Channel;
  readonly #timeoutMs: number;

  constructor(channel: Channel, timeoutMs: number) {
    this.#channel = channel;
    this.#timeoutMs = timeoutMs;
  }

  async choose(signal: AbortSignal): Promise<Channel> {
    await this.#channel.ready(signal, this.#timeoutMs);
    return this.#channel;
  }

  noteFailure(): void {}

  close(): void {
    this.#channel.close();
  }
}

/**
 * Several, of which a client begins with any: so many clients are spread.
 *
 * It stays with the one that it has. One that cannot be reached, has no executor or is being stopped
 * is left for another that serves; without another, it is the one that is asked even so.
 */
export class Schedulers implements Target {
  readonly #parts: SchedulersParts;
  readonly #closing = new AbortController();
  readonly #channels = new Map<string, Channel>();
  #current: string | undefined;
  #freshUntil = 0;
  #stopping: string | undefined;
  /** Of all calls that wait for it. */
  #search: Promise<Channel> | undefined;

  /** `stopping`: one that said that it stops. Any other is better, though it has no executor yet. */
  constructor(parts: SchedulersParts, stopping?: string) {
    this.#parts = parts;
    this.#stopping = stopping;
  }

  get hasLeftOne(): boolean {
    return this.#stopping !== undefined;
  }

  close(): void {
    this.#closing.abort(new ServerUnreachable("the client was closed"));
    for (const channel of this.#channels.values()) channel.close();
  }

  async choose(signal: AbortSignal): Promise<Channel> {
    signal.throwIfAborted();
    const current = this.#current === undefined ? undefined : this.#channels.get(this.#current);
    if (current !== undefined && this.#parts.now() < this.#freshUntil) return current;
    this.#search ??= this.#find().finally(() => (this.#search = undefined));
    return unlessAborted(this.#search, signal);
  }

  noteFailure(channel: Channel, error: unknown): void {
    // Whatever it was, it is looked at again before the next call.
    this.#freshUntil = 0;
    if (!(error instanceof Draining)) return;
    for (const [address, each] of this.#channels) if (each === channel) this.#stopping = address;
  }

  /** The one that it has, if that serves, or another. Throws SplitserveError. */
  async #find(): Promise<Channel> {
    const addresses = await this.#parts.discovery.addresses();
    this.#forgetOthers(addresses);
    const known = (address?: string): string[] =>
      address !== undefined && addresses.includes(address) ? [address] : [];
    const last = known(this.#stopping);
    const mine = this.#current === this.#stopping ? [] : known(this.#current);
    const others = addresses.filter((each) => ![...mine, ...last].includes(each));
    const answers: Answers = {};
    for (const each of [mine, (this.#parts.shuffle ?? shuffle)(others), last]) {
      if (answers.serving === undefined) await ask(each, this.#isServing, answers);
    }
    this.#closing.signal.throwIfAborted();
    const found = answers.serving ?? answers.idle;
    if (found === undefined)
      throw answers.problem ?? new ServerUnreachable("no scheduler is known");
    if (answers.serving !== undefined) this.#freshUntil = this.#parts.now() + FRESH_MS;
    if (answers.serving === this.#stopping) this.#stopping = undefined;
    this.#current = found;
    return this.#channelTo(found);
  }

  /** Calls of a channel that is closed run to their ends. */
  #forgetOthers(addresses: readonly string[]): void {
    for (const [address, channel] of this.#channels) {
      if (addresses.includes(address) || address === this.#current) continue;
      this.#channels.delete(address);
      channel.close();
    }
  }

  readonly #isServing = (address: string, signal: AbortSignal): Promise<boolean> => {
    const either = AbortSignal.any([signal, this.#closing.signal]);
    return this.#parts.isServing(this.#channelTo(address), either);
  };

  #channelTo(address: string): Channel {
    let channel = this.#channels.get(address);
    if (channel === undefined) this.#channels.set(address, (channel = this.#parts.open(address)));
    return channel;
  }
}

function shuffle(addresses: string[]): string[] {
  return addresses
    .map((address) => ({ address, place: Math.random() }))
    .sort((one, other) => one.place - other.place)
    .map(({ address }) => address);
}

/** What `promise` brings, unless the caller is gone before. */
async function unlessAborted<T>(promise: Promise<T>, signal: AbortSignal): Promise<T> {
  let leave!: () => void;
  const left = new Promise<never>((_, fail) => (leave = () => fail(signal.reason)));
  signal.addEventListener("abort", leave, { once: true });
  try {
    return await Promise.race([promise, left]);
  } finally {
    signal.removeEventListener("abort", leave);
  }
}
