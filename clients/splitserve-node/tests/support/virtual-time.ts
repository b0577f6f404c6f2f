// Time that passes only by sleeping.

import type { Timing } from "splitserve";

export class VirtualTime implements Timing {
  readonly pausesMs: number[] = [];
  beforeWake: () => void | Promise<void> = () => undefined;
  #nowMs = 100_000;

  now = (): number => this.#nowMs;

  async sleep(delayMs: number, signal: AbortSignal): Promise<void> {
    this.#nowMs += delayMs;
    this.pausesMs.push(delayMs);
    await this.beforeWake();
    signal.throwIfAborted();
  }

  jitter(): number {
    return 1;
  }
}
