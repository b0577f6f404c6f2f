// Which of many schedulers serves: asked one soon after the other, and the first that does wins.

import { setTimeout as sleep } from "node:timers/promises";

import { SplitserveError } from "./errors.js";

// Of those that say nothing no more than these are waited for at a time.
const MAX_AT_ONCE = 8;
// The next one is asked if nobody answered for so long: mostly the first does, and clients that asked
// all of them would be with the fastest, and not spread.
const PACE_MS = 250;

/** What they said. */
export interface Answers {
  serving?: string;
  /** The first that said that it does not serve. */
  idle?: string;
  problem?: SplitserveError;
}

/** Throws SplitserveError for one that cannot be reached, and takes bounded time. */
export type IsServing = (address: string, signal: AbortSignal) => Promise<boolean>;

/** Adds to `answers` until one serves, or all have answered. */
export async function ask(
  addresses: readonly string[],
  isServing: IsServing,
  answers: Answers,
): Promise<void> {
  const over = new AbortController();
  const asked = new Set<Promise<void>>();
  const left = [...addresses];
  try {
    while (answers.serving === undefined && (left.length > 0 || asked.size > 0)) {
      const next = asked.size < MAX_AT_ONCE ? left.shift() : undefined;
      if (next !== undefined) {
        const asking = note(next, isServing, answers, over.signal);
        asked.add(asking);
        void asking.then(() => asked.delete(asking));
      }
      const mayAsk = left.length > 0 && asked.size < MAX_AT_ONCE;
      await (mayAsk ? withPace(asked) : Promise.race(asked));
    }
  } finally {
    over.abort(new SplitserveError("another one was found"));
  }
}

async function withPace(asked: ReadonlySet<Promise<void>>): Promise<void> {
  const answered = new AbortController();
  const pace = sleep(PACE_MS, undefined, { signal: answered.signal }).catch(() => undefined);
  await Promise.race([...asked, pace]);
  answered.abort();
}

async function note(
  address: string,
  isServing: IsServing,
  answers: Answers,
  signal: AbortSignal,
): Promise<void> {
  try {
    if (!(await isServing(address, signal))) answers.idle ??= address;
    else answers.serving ??= address;
  } catch (error) {
    if (!signal.aborted) answers.problem = problemOf(error);
  }
}

function problemOf(error: unknown): SplitserveError {
  return error instanceof SplitserveError
    ? error
    : new SplitserveError(String(error), { cause: error });
}
