// All of what a request brought, at once.

import { ServerUnreachable } from "./errors.js";
import type {
  Finish,
  FinishReason,
  GenerationEvent,
  SequenceFinish,
  TokenLogprob,
  Usage,
} from "./types.js";

/** One completion; `tokenIds` without those it was resumed with. */
export interface Completion {
  readonly index: number;
  readonly tokenIds: readonly number[];
  readonly logprobs: readonly TokenLogprob[];
  readonly reason: FinishReason;
  readonly stopTokenId?: number;
  readonly cumulativeLogprob?: number;
  readonly score?: number;
}

/** The completions of a request by index; with `bestOf` and beam search the best is first. */
export interface Generation {
  readonly completions: readonly Completion[];
  /** The tokens of the first completion, or the only one. */
  readonly tokenIds: readonly number[];
  readonly usage: Usage;
  readonly promptLogprobs: readonly TokenLogprob[];
}

/**
 * Reads `events` to their Finish. Throws what they throw.
 *
 * What had not ended when the request was aborted is there as far as it came, as "aborted".
 */
export async function collectGeneration(
  events: AsyncIterable<GenerationEvent>,
  numCompletions = 1,
): Promise<Generation> {
  const parts = new Map<number, Parts>();
  const partOf = (index: number): Parts => {
    let part = parts.get(index);
    if (part === undefined) parts.set(index, (part = new Parts(index)));
    return part;
  };
  for (let index = 0; index < numCompletions; index++) partOf(index);
  const promptLogprobs: TokenLogprob[] = [];
  for await (const event of events) {
    if (event.type === "finish") {
      const completions = [...parts.values()]
        .sort((a, b) => a.index - b.index)
        .map((part) => part.completion(event));
      const tokenIds = completions[0]?.tokenIds ?? [];
      return { completions, tokenIds, usage: event.usage, promptLogprobs };
    }
    for (const score of event.promptLogprobs) promptLogprobs.push(score);
    const part = partOf(event.index);
    for (const tokenId of event.tokenIds) part.tokenIds.push(tokenId);
    for (const score of event.logprobs) part.logprobs.push(score);
    part.finish = event.finish ?? part.finish;
  }
  throw new ServerUnreachable("the stream ended without a finish");
}

/** One completion in the making. */
class Parts {
  readonly index: number;
  readonly tokenIds: number[] = [];
  readonly logprobs: TokenLogprob[] = [];
  finish: SequenceFinish | undefined;

  constructor(index: number) {
    this.index = index;
  }

  /** `end` is that of the request: what there is of a request with one plain sequence. */
  completion(end: Finish): Completion {
    const { index, tokenIds, logprobs } = this;
    const { reason, stopTokenId } = this.finish ?? end;
    const { cumulativeLogprob, score } = this.finish ?? {};
    return {
      index,
      tokenIds,
      logprobs,
      reason,
      ...(stopTokenId !== undefined && { stopTokenId }),
      ...(cumulativeLogprob !== undefined && { cumulativeLogprob }),
      ...(score !== undefined && { score }),
    };
  }
}
