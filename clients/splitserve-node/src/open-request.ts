// An unfinished request as its session keeps it.

import type { ResumableRequest } from "./resumable-request.js";
import type { Backoff } from "./resumption.js";
import type { SessionStream } from "./session-stream.js";

export interface OpenRequest {
  readonly request: ResumableRequest;
  readonly stream: SessionStream;
  readonly backoff: Backoff;
  /** Lets go of the caller's signal. */
  readonly forget: () => void;
  /** The call over which the server has it. */
  sentOver?: object | undefined;
  /** Ends the pause before it is submitted again. */
  pause?: AbortController | undefined;
}

/**
 * The unfinished requests of a session, by handle. Only those that are wanted can be submitted: one
 * that is aborted is not among them any more, and what is still to come of it comes over the call
 * that has it, or not at all.
 */
export class OpenRequests {
  readonly wanted = new Map<number, OpenRequest>();
  readonly aborted = new Map<number, OpenRequest>();
  #lastHandle = 0;

  get(handle: number): OpenRequest | undefined {
    return this.wanted.get(handle) ?? this.aborted.get(handle);
  }

  newHandle(): number {
    do this.#lastHandle = (this.#lastHandle % MAX_HANDLE) + 1;
    while (this.get(this.#lastHandle) !== undefined);
    return this.#lastHandle;
  }

  /** What is wanted no longer; undefined if it was not. */
  abort(handle: number): OpenRequest | undefined {
    const open = this.wanted.get(handle);
    if (open === undefined) return undefined;
    this.wanted.delete(handle);
    this.aborted.set(handle, open);
    open.pause?.abort();
    return open;
  }

  /** Forgets a request that has ended; undefined if it is forgotten already. */
  remove(handle: number): OpenRequest | undefined {
    const open = this.get(handle);
    this.wanted.delete(handle);
    this.aborted.delete(handle);
    open?.pause?.abort();
    open?.forget();
    return open;
  }
}

const MAX_HANDLE = 2 ** 31 - 1;
