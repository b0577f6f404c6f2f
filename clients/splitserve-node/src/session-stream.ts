// The events of one request of a session, as its reader takes them.

import { plainTokens } from "./resumable-request.js";
import type { Finish, GenerationEvent, Tokens } from "./types.js";

export type Outcome = { readonly finish: Finish } | { readonly error: unknown };

/**
 * An iterator over the events of one request; the last is a Finish.
 *
 * Events are kept until they are read, so that whoever is slow to read this one keeps none of the
 * others waiting: at most as many tokens as the request was allowed. Plain tokens that wait together
 * come as one event. Leaving a `for await` loop aborts the request.
 */
export class SessionStream implements AsyncIterableIterator<GenerationEvent, void, void> {
  /** For `Client.abort` and for the logs. */
  readonly requestId: string;
  readonly #abort: () => void;
  #waiting: Tokens[] = [];
  /** Plain tokens that came after those in `waiting`. */
  #plain: number[] = [];
  #outcome: Outcome | undefined;
  #hasEnded = false;
  #wake: (() => void) | undefined;

  constructor(requestId: string, abort: () => void) {
    this.requestId = requestId;
    this.#abort = abort;
  }

  /** Ends the request; a Finish still follows. Harmless once it has ended. */
  abort(): void {
    this.#abort();
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  /** To be called again only when the last call has been answered, as `for await` does. */
  async next(): Promise<IteratorResult<GenerationEvent, void>> {
    while (!this.#hasEnded) {
      const tokens = this.#take();
      if (tokens !== undefined) return { done: false, value: tokens };
      if (this.#outcome !== undefined) {
        this.#hasEnded = true;
        if ("error" in this.#outcome) throw this.#outcome.error;
        return { done: false, value: this.#outcome.finish };
      }
      await new Promise<void>((wake) => (this.#wake = wake));
    }
    return { done: true, value: undefined };
  }

  /** Ends the request, and this iterator at once. */
  async return(): Promise<IteratorResult<GenerationEvent, void>> {
    this.#hasEnded = true;
    this.#waiting = [];
    this.#plain = [];
    this.#wake?.();
    this.#abort();
    return { done: true, value: undefined };
  }

  #take(): Tokens | undefined {
    const tokens = this.#waiting.shift();
    if (tokens !== undefined || this.#plain.length === 0) return tokens;
    const tokenIds = this.#plain;
    this.#plain = [];
    return plainTokens(tokenIds);
  }

  /** Hands over tokens; for the session. */
  put(tokens: Tokens): void {
    if (this.#hasEnded) return;
    this.#flush();
    this.#waiting.push(tokens);
    this.#wake?.();
  }

  /** Hands over a token of a request with one sequence and without scores; for the session. */
  putPlain(tokenId: number): void {
    if (this.#hasEnded) return;
    this.#plain.push(tokenId);
    this.#wake?.();
  }

  /** Hands over the end; for the session. */
  end(outcome: Outcome): void {
    this.#outcome = outcome;
    this.#wake?.();
  }

  #flush(): void {
    if (this.#plain.length === 0) return;
    this.#waiting.push(plainTokens(this.#plain));
    this.#plain = [];
  }
}
