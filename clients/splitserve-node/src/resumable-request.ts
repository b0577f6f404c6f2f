// A request that goes on after its stream broke: what was asked for, and what has come back.

import { randomBytes } from "node:crypto";

import { currentTrace } from "./current-trace.js";
import { decodeFinish, decodeSequenceFinish, decodeTokens } from "./decoding.js";
import {
  checkOptions,
  encodeSamplingParams,
  encodeSchedulingParams,
  encodeTraceContext,
  tokenIdsOf,
  type GenerateRequestInit,
} from "./encoding.js";
import {
  Draining,
  ModelNotReady,
  QueueFull,
  QuotaExceeded,
  RequestIdInUse,
  ServerUnreachable,
  StreamNotRead,
} from "./errors.js";
import type { GenerateResponse, SessionEvent } from "./gen/splitserve/scheduler/v1/scheduler_pb.js";
import type {
  Finish,
  GenerationEvent,
  RequestOptions,
  SamplingParams,
  SchedulingParams,
  TokenIds,
  Tokens,
} from "./types.js";
import { hasSeveralSequences, isStreamed } from "./types.js";

// What ends a stream, and not what it was for.
const BROKEN = [ServerUnreachable, StreamNotRead];
// What a server may say while it, or its successor, comes up again.
const PASSING = [...BROKEN, Draining, ModelNotReady, QueueFull, QuotaExceeded, RequestIdInUse];
// Of a deadline that has passed; a server takes none that is not above 0.
const LEAST_DEADLINE_MS = 1;

/**
 * A request and what has come back so far, by sequence.
 *
 * It draws the seed and the id that were not given, since a continuation needs the same seed and an
 * abort the id. Where the best sequences are chosen at the end, what comes is held until all of it
 * is there: a stream that breaks among it starts over, and nothing is handed out twice.
 */
export class ResumableRequest {
  readonly requestId: string;
  readonly #constants: GenerateRequestInit;
  readonly #numPromptTokens: number;
  readonly #scheduling: SchedulingParams;
  readonly #now: () => number;
  readonly #isStreamed: boolean;
  readonly #isPlain: boolean;
  readonly #outputs: Map<number, number[]>;
  readonly #finished = new Set<number>();
  #held: Tokens[] = [];
  #submittedAt: number | undefined;
  #numPromptLogprobs = 0;
  #numRepeatedPromptLogprobs = 0;
  #wasLost = false;

  /** Throws InvalidRequest for what cannot be sent. */
  constructor(
    prompt: TokenIds,
    params: SamplingParams,
    options: RequestOptions,
    now: () => number,
  ) {
    checkOptions(options);
    const promptTokenIds = tokenIdsOf(prompt);
    const seed = params.seed ?? randomBytes(8).readBigInt64LE();
    this.requestId = options.requestId || randomBytes(16).toString("hex");
    this.#constants = {
      requestId: this.requestId,
      promptTokenIds,
      samplingParams: encodeSamplingParams({ ...params, seed }),
      encoderTokenIds: tokenIdsOf(options.encoderTokenIds ?? []),
      modelDigest: options.modelDigest ?? "",
      ...encodeTraceContext(options.traceContext ?? currentTrace()),
    };
    this.#numPromptTokens = promptTokenIds.length;
    this.#scheduling = options.scheduling ?? {};
    this.#now = now;
    this.#isStreamed = isStreamed(params);
    this.#outputs = byIndex(options.resumeTokenIds ?? []);
    const isFirstAlone = [...this.#outputs.keys()].every((index) => index === 0);
    this.#isPlain = !hasSeveralSequences(params) && isFirstAlone;
  }

  // -- what is sent -------------------------------------------------------------------------------

  /** The request that brings what is still missing. */
  message(): GenerateRequestInit {
    const scheduling = encodeSchedulingParams(this.#scheduling, this.#remainingDeadlineMs());
    const message = { ...scheduling, ...this.#constants };
    if (this.#isPlain) return { ...message, resumeTokenIds: this.#outputs.get(0) ?? [] };
    // A sequence that has ended is among them: with all its tokens it ends at once.
    const resumeSequences = [...this.#outputs]
      .filter(([, tokenIds]) => tokenIds.length > 0)
      .map(([index, tokenIds]) => ({ index, tokenIds }));
    return { ...message, resumeSequences };
  }

  /** What is left of the deadline; the first submission is when it begins to count. */
  #remainingDeadlineMs(): number | undefined {
    const { deadlineMs } = this.#scheduling;
    if (deadlineMs == null) return undefined;
    if (this.#submittedAt === undefined) {
      this.#submittedAt = this.#now();
      return deadlineMs;
    }
    return Math.max(deadlineMs - (this.#now() - this.#submittedAt), LEAST_DEADLINE_MS);
  }

  // -- what comes back ----------------------------------------------------------------------------

  /**
   * Notes what `event` brings; returns what is new and complete enough to hand out. Throws the error
   * of a request that failed.
   */
  receive(event: GenerateResponse["event"] | SessionEvent["event"]): GenerationEvent[] {
    switch (event.case) {
      case "tokens":
        return this.#receive(decodeTokens(event.value));
      case "sequenceFinish": {
        const finish = decodeSequenceFinish(event.value);
        return this.#receive({ ...plainTokens([]), index: finish.index, finish });
      }
      case "finish":
        return [...this.#held, decodeFinish(event.value)];
      default:
        return [];
    }
  }

  /** Notes one plain token. */
  receiveToken(tokenId: number): Tokens {
    this.#outputOf(0).push(tokenId);
    return plainTokens([tokenId]);
  }

  #receive(tokens: Tokens): Tokens[] {
    if (!this.#isStreamed) {
      this.#held.push(tokens);
      return [];
    }
    return this.#finished.has(tokens.index) ? [] : this.#note(tokens);
  }

  #note(tokens: Tokens): Tokens[] {
    // A stream that broke before the first token starts over with the scores of the prompt.
    const numKnown = Math.min(this.#numRepeatedPromptLogprobs, tokens.promptLogprobs.length);
    this.#numRepeatedPromptLogprobs -= numKnown;
    const promptLogprobs = tokens.promptLogprobs.slice(numKnown);
    this.#numPromptLogprobs += promptLogprobs.length;
    const output = this.#outputOf(tokens.index);
    for (const tokenId of tokens.tokenIds) output.push(tokenId);
    if (tokens.finish !== undefined) this.#finished.add(tokens.index);
    const isEmpty = tokens.tokenIds.length + promptLogprobs.length === 0 && !tokens.finish;
    return isEmpty ? [] : [{ ...tokens, promptLogprobs }];
  }

  #outputOf(index: number): number[] {
    let output = this.#outputs.get(index);
    if (output === undefined) this.#outputs.set(index, (output = []));
    return output;
  }

  // -- when it breaks -----------------------------------------------------------------------------

  /** Whether to submit again after `error`; notes that the stream was lost. */
  mayGoOn(error: unknown): boolean {
    const isResumption = this.#wasLost || this.#hasTokens;
    if (!(isResumption ? PASSING : BROKEN).some((kind) => error instanceof kind)) return false;
    this.#wasLost = true;
    this.#held = [];
    if (!this.#hasTokens) this.#numRepeatedPromptLogprobs = this.#numPromptLogprobs;
    return true;
  }

  /** The end of a request that was aborted while no server had it. */
  aborted(): Finish {
    let numOutputTokens = 0;
    for (const output of this.#outputs.values()) numOutputTokens += output.length;
    const usage = {
      numPromptTokens: this.#numPromptTokens,
      numOutputTokens,
      numCachedTokens: 0,
      numPreemptions: 0,
    };
    return { type: "finish", reason: "aborted", usage };
  }

  get #hasTokens(): boolean {
    return [...this.#outputs.values()].some((output) => output.length > 0);
  }
}

/** Tokens of a request with one sequence and without scores. */
export function plainTokens(tokenIds: readonly number[]): Tokens {
  return { type: "tokens", tokenIds, logprobs: [], promptLogprobs: [], index: 0 };
}

function byIndex(tokenIds: TokenIds | ReadonlyMap<number, TokenIds>): Map<number, number[]> {
  if (!(tokenIds instanceof Map)) return new Map([[0, tokenIdsOf(tokenIds as TokenIds)]]);
  return new Map([...tokenIds].map(([index, each]) => [index, tokenIdsOf(each as TokenIds)]));
}
