// The values of the client's interface. Meanings and ranges of what goes into a request:
// `SamplingParams` and `GenerateRequest` in scheduler.proto; the server checks them.

const MAX_COMPLETIONS = 128;

/** Token ids. They are copied when a request is made. */
export type TokenIds = Iterable<number>;

/** Beam search over `width` hypotheses; what is not given is left to the server. */
export interface BeamSearch {
  readonly width: number;
  readonly lengthPenalty?: number;
  readonly earlyStopping?: "heuristic" | "always" | "never";
}

/**
 * What the text of the output must follow: one of these. A JSON schema may be an object or its JSON,
 * a regular expression is in the syntax of the Rust crate regex, a Lark grammar in the dialect of
 * llguidance. With choices the text is one of them.
 */
export type Grammar =
  | { readonly jsonSchema: string | object }
  | { readonly regex: string }
  | { readonly lark: string }
  | { readonly choices: readonly string[] };

/**
 * How tokens are chosen and when to stop; what is not given is left to the server, whose defaults
 * are neutral. What the model's authors recommend is in `Model.defaultSamplingParams`.
 */
export interface SamplingParams {
  readonly temperature?: number;
  readonly topK?: number;
  readonly topP?: number;
  readonly minP?: number;
  readonly repetitionPenalty?: number;
  readonly presencePenalty?: number;
  readonly frequencyPenalty?: number;
  readonly logitBias?: Readonly<Record<number, number>>;
  /** 64 bits, signed; a number only where it is exact. Without one the client draws it. */
  readonly seed?: bigint | number;
  readonly maxTokens?: number;
  readonly minTokens?: number;
  readonly stopTokenIds?: readonly number[];
  readonly ignoreEos?: boolean;
  readonly numLogprobs?: number;
  readonly numPromptLogprobs?: number;
  readonly n?: number;
  readonly bestOf?: number;
  readonly beamSearch?: BeamSearch;
  /** Without it all tokens; an empty list is refused. */
  readonly allowedTokenIds?: readonly number[];
  readonly badWordsTokenIds?: readonly (readonly number[])[];
  readonly grammar?: Grammar;
}

/** What a request asks of the scheduler, rather than of the model. */
export interface SchedulingParams {
  /** Smaller is more urgent. */
  readonly priority?: number;
  readonly tenant?: string;
  /**
   * Time from the first submission by which the last token is wanted; a request that is submitted
   * again sends what is left of it.
   */
  readonly deadlineMs?: number;
  readonly adapter?: string;
  readonly cacheSalt?: string;
  readonly bypassPrefixCache?: boolean;
  /** So many tokens at the beginning of the prompt are no secret: tenants share their cached KV. */
  readonly numPublicPrefixTokens?: number;
}

/**
 * The span that a request belongs to (W3C Trace Context). Servers that write traces go on with it;
 * nobody is refused for it.
 */
export interface TraceContext {
  readonly traceparent: string;
  readonly tracestate?: string;
}

/** What a request may have besides its prompt and its sampling params. */
export interface RequestOptions {
  /** At most 128 characters; without one the client draws it. */
  readonly requestId?: string;
  /**
   * Output tokens the caller has from an earlier run, with the seed of that run; of several
   * sequences a map from the index of each.
   */
  readonly resumeTokenIds?: TokenIds | ReadonlyMap<number, TokenIds>;
  readonly scheduling?: SchedulingParams;
  /** For models with an encoder. */
  readonly encoderTokenIds?: TokenIds;
  /**
   * `Model.digest` of the model that the tokens are of: ModelChanged if another is served, now or
   * when the request goes on.
   */
  readonly modelDigest?: string;
  /**
   * The span that it belongs to. Without one it is the active span of OpenTelemetry, if the
   * application has `@opentelemetry/api`; `{ traceparent: "" }` for none.
   */
  readonly traceContext?: TraceContext;
  /** Aborts the request; who reads it then gets the signal's reason thrown. */
  readonly signal?: AbortSignal;
}

/** Options of a request that has a stream of its own. */
export interface GenerateOptions extends RequestOptions {
  /** From now to the last token, pauses and resumptions included; then DeadlineExceeded. */
  readonly timeoutMs?: number;
}

/** Why a request, or one of its sequences, ended; one that failed throws RequestFailed. */
export type FinishReason = "stop" | "length" | "model_length" | "aborted";

/** One alternative to a token. */
export interface TopLogprob {
  readonly tokenId: number;
  readonly logprob: number;
}

/** The score of a token; rank 1 is the most probable; `top` has the best first. */
export interface TokenLogprob {
  readonly tokenId: number;
  readonly logprob: number;
  readonly rank: number;
  readonly top: readonly TopLogprob[];
}

/** The end of one of several sequences. */
export interface SequenceFinish {
  readonly index: number;
  readonly reason: FinishReason;
  readonly stopTokenId?: number;
  /** Resumed ones included. */
  readonly numOutputTokens: number;
  /** With `bestOf` and beam search: the sum of its tokens' logprobs. */
  readonly cumulativeLogprob?: number;
  /** With beam search: what decided. */
  readonly score?: number;
}

/** New output tokens of one sequence, in order. */
export interface Tokens {
  readonly type: "tokens";
  readonly tokenIds: readonly number[];
  /** Parallel to `tokenIds`, or empty. */
  readonly logprobs: readonly TokenLogprob[];
  readonly promptLogprobs: readonly TokenLogprob[];
  /** Which of several sequences; 0 if there is one. */
  readonly index: number;
  /** Of several sequences: how this one ended, if this is its end. There may be no tokens with it. */
  readonly finish?: SequenceFinish;
}

/** Token counts of a request. */
export interface Usage {
  readonly numPromptTokens: number;
  /** Of all sequences returned, resumed ones included. */
  readonly numOutputTokens: number;
  readonly numCachedTokens: number;
  readonly numPreemptions: number;
}

/** The end of a request; of several sequences, reason and stop token are the first one's. */
export interface Finish {
  readonly type: "finish";
  readonly reason: FinishReason;
  readonly stopTokenId?: number;
  readonly usage: Usage;
}

/** What a stream brings; the last event is a Finish. */
export type GenerationEvent = Tokens | Finish;

/** Whether a scheduler serves, and if not, why. "unknown": it does not say, or a later reason. */
export type Readiness =
  "unknown" | "ready" | "no_executor" | "no_progress" | "draining" | "executors_failing";

/** The model that is served. Token ids are 0 .. vocabSize-1. */
export interface Model {
  readonly name: string;
  readonly digest: string;
  readonly dtype: string;
  readonly vocabSize: number;
  readonly maxModelLen: number;
  readonly maxNumSequences: number;
  readonly eosTokenIds: readonly number[];
  /** What its authors recommend. Requests do not get it by themselves. */
  readonly defaultSamplingParams: SamplingParams;
  /** Of the scheduler, when it was asked. */
  readonly readiness: Readiness;
}

/** One executor as the scheduler sees it. */
export interface Executor {
  readonly address: string;
  readonly executorEpoch: bigint;
  readonly isConnected: boolean;
  readonly modelName: string;
  readonly dtype: string;
  readonly blockSize: number;
  readonly numDeviceBlocks: number;
  readonly numFreeDeviceBlocks: number;
  readonly numCachedDeviceBlocks: number;
  readonly numHostBlocks: number;
  readonly numFreeHostBlocks: number;
  readonly numWaitingRequests: number;
  readonly numRunningRequests: number;
  readonly numSwappedRequests: number;
  readonly numSteps: bigint;
  readonly numPreemptions: bigint;
  /** It is on its way out. */
  readonly isDraining: boolean;
  /** Whether its steps or rows fail, whatever it is given. */
  readonly isFailing: boolean;
  /** Whether it gets no requests for that. */
  readonly isWithdrawn: boolean;
}

/** All executors, in order of registration, and the requests that none of them can be given. */
export interface ExecutorList {
  readonly executors: readonly Executor[];
  readonly numUnassignedRequests: number;
  /** Those of them that none that takes requests could ever run. */
  readonly numUnfittingRequests: number;
}

/** `timeoutMs`: how long what runs at an executor may take to end, up to an hour. */
export interface DrainOptions {
  readonly timeoutMs?: number;
  readonly signal?: AbortSignal;
}

/** An executor that was sent away is gone. */
export interface DrainedExecutor {
  /** Those that go on elsewhere, or wait for that. */
  readonly numMovedRequests: number;
  /** It was lost before all was done. */
  readonly isLost: boolean;
}

/** How many completions come back; a server refuses an `n` that does not allow so many. */
export function numCompletions(params: SamplingParams): number {
  return Math.min(Math.max(params.n ?? 1, 1), MAX_COMPLETIONS);
}

/** Whether more than one plain sequence is computed. */
export function hasSeveralSequences(params: SamplingParams): boolean {
  return Math.max(numCompletions(params), params.bestOf ?? 1) > 1 || params.beamSearch != null;
}

/** Whether tokens come as they are computed: not so where the best are chosen at the end. */
export function isStreamed(params: SamplingParams): boolean {
  return (params.bestOf ?? 1) <= numCompletions(params) && params.beamSearch == null;
}
