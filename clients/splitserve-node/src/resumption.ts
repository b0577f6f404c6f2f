// Patience: how long, and how often, to try again after a stream broke.

import { setTimeout as sleep } from "node:timers/promises";

import { DeadlineExceeded, type SplitserveError } from "./errors.js";

/**
 * Pauses between attempts: growing by `factor` up to a maximum, with a jitter. `giveUpAfterMs`
 * counts from the loss; any progress ends the count.
 */
export interface RetryPolicy {
  readonly firstDelayMs: number;
  readonly factor: number;
  readonly maxDelayMs: number;
  readonly giveUpAfterMs: number;
}

export const DEFAULT_RETRY: RetryPolicy = {
  firstDelayMs: 100,
  factor: 2,
  maxDelayMs: 1000,
  giveUpAfterMs: 60_000,
};

/** Where time comes from; tests bring their own. */
export interface Timing {
  /** Monotonic milliseconds. */
  now(): number;
  /** Rejects with the reason of `signal` when that is aborted. */
  sleep(delayMs: number, signal: AbortSignal): Promise<void>;
  /** In [0, 1). */
  jitter(): number;
}

export const REAL_TIME: Timing = {
  now: () => performance.now(),
  async sleep(delayMs, signal) {
    try {
      await sleep(delayMs, undefined, { signal });
    } catch {
      signal.throwIfAborted();
    }
  },
  jitter: Math.random,
};

/** The pauses of one request or session. */
export class Backoff {
  readonly #policy: RetryPolicy;
  readonly #timing: Timing;
  readonly #deadline: number | undefined;
  #lostAt: number | undefined;
  #delayMs: number;

  constructor(policy: RetryPolicy, timing: Timing, timeoutMs?: number) {
    this.#policy = policy;
    this.#timing = timing;
    this.#deadline = timeoutMs === undefined ? undefined : timing.now() + timeoutMs;
    this.#delayMs = policy.firstDelayMs;
  }

  /** Forgets the failures so far: there was progress. */
  reset(): void {
    this.#lostAt = undefined;
    this.#delayMs = this.#policy.firstDelayMs;
  }

  /** Time until the deadline, undefined without one. Throws DeadlineExceeded after it. */
  remainingMs(): number | undefined {
    if (this.#deadline === undefined) return undefined;
    const remainingMs = this.#deadline - this.#timing.now();
    if (remainingMs <= 0) throw new DeadlineExceeded("the timeout of the request has passed");
    return remainingMs;
  }

  /** Waits before the next attempt. Throws `error` once patience is at its end. */
  async pause(error: SplitserveError, signal: AbortSignal): Promise<void> {
    const delayMs = this.nextDelayMs(error);
    if (!this.lasts(delayMs)) throw error;
    await this.#timing.sleep(Math.min(delayMs, this.remainingMs() ?? delayMs), signal);
  }

  /** How long to wait after `error`: longer each time. */
  nextDelayMs(error: SplitserveError): number {
    const delayMs = this.#delayMs * (0.5 + 0.5 * this.#timing.jitter());
    this.#delayMs = Math.min(this.#delayMs * this.#policy.factor, this.#policy.maxDelayMs);
    return Math.max(delayMs, error.retryDelayMs ?? 0);
  }

  /** Whether patience, which counts from the first failure since progress, lasts `delayMs` more. */
  lasts(delayMs: number): boolean {
    const now = this.#timing.now();
    this.#lostAt ??= now;
    return now + delayMs - this.#lostAt <= this.#policy.giveUpAfterMs;
  }
}
