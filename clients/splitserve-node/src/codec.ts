// The client's values to protobuf messages and back.

import {
  create,
  toBinary,
  type DescMessage,
  type MessageInitShape,
} from "@bufbuild/protobuf";
import { DurationSchema, type Duration } from "@bufbuild/protobuf/wkt";

import { errorOfReason, InvalidRequest, RequestFailed, type SplitserveError } from "./errors.js";
import type { ExecutorState } from "./gen/splitserve/scheduler/v1/admin_pb.js";
import * as api from "./gen/splitserve/scheduler/v1/scheduler_pb.js";
import type {
  BeamSearch,
  Executor,
  Finish,
  FinishReason,
  GenerateOptions,
  Model,
  SamplingParams,
  SchedulingParams,
  SequenceFinish,
  TokenIds,
  TokenLogprob,
  Tokens,
} from "./types.js";

/** A request in the making. */
export type GenerateRequestInit = Exclude<
  MessageInitShape<typeof api.GenerateRequestSchema>,
  api.GenerateRequest
>;

const EARLY_STOPPING = {
  heuristic: api.BeamEarlyStopping.HEURISTIC,
  always: api.BeamEarlyStopping.ALWAYS,
  never: api.BeamEarlyStopping.NEVER,
} as const;

const FINISH_REASONS: ReadonlyMap<api.FinishReason, FinishReason> = new Map([
  [api.FinishReason.STOP, "stop"],
  [api.FinishReason.LENGTH, "length"],
  [api.FinishReason.MODEL_LENGTH, "model_length"],
  [api.FinishReason.ABORTED, "aborted"],
]);

const SCHEDULING_NAMES: ReadonlySet<string> = new Set([
  "priority",
  "tenant",
  "deadlineMs",
  "adapter",
  "cacheSalt",
  "bypassPrefixCache",
] satisfies (keyof SchedulingParams)[]);

const OPTION_NAMES: ReadonlySet<string> = new Set([
  "requestId",
  "resumeTokenIds",
  "scheduling",
  "encoderTokenIds",
  "signal",
  "timeoutMs",
] satisfies (keyof GenerateOptions)[]);

/** Throws InvalidRequest for an option that is none. */
export function checkOptions(options: GenerateOptions): void {
  checkNames("options", options, OPTION_NAMES);
}

/** A copy. Throws InvalidRequest for text, whose digits would pass for token ids. */
export function tokenIdsOf(tokenIds: TokenIds): number[] {
  if (typeof tokenIds === "string") {
    throw new InvalidRequest("token ids are numbers, not text; the tokenizer makes them of text");
  }
  return Array.from(tokenIds);
}

/** The bytes of a message. Throws InvalidRequest for a value that does not fit its field at all. */
export function encode<D extends DescMessage>(schema: D, init: MessageInitShape<D>): Buffer {
  try {
    return Buffer.from(toBinary(schema, create(schema, init)));
  } catch (error) {
    const message = error instanceof Error ? error.message : String(error);
    throw new InvalidRequest(message, { cause: error });
  }
}

/** Throws InvalidRequest for a name that is none, and for what cannot be sent as it is. */
export function encodeSamplingParams(
  params: SamplingParams,
): MessageInitShape<typeof api.SamplingParamsSchema> {
  checkNames("SamplingParams", params, namesOf(api.SamplingParamsSchema));
  const { seed, beamSearch, badWordsTokenIds, ...same } = given(params);
  if (same.allowedTokenIds?.length === 0) {
    throw new InvalidRequest("allowedTokenIds is empty; allowed: 1 or more, or none given for all");
  }
  return {
    ...same,
    stopTokenIds: [...(same.stopTokenIds ?? [])],
    allowedTokenIds: [...(same.allowedTokenIds ?? [])],
    badWordsTokenIds: (badWordsTokenIds ?? []).map((tokenIds) => ({ tokenIds: [...tokenIds] })),
    ...(seed !== undefined && { seed: encodeSeed(seed) }),
    ...(beamSearch !== undefined && { beamSearch: encodeBeamSearch(beamSearch) }),
  };
}

function encodeSeed(seed: bigint | number): bigint {
  if (typeof seed !== "bigint" && !Number.isSafeInteger(seed)) {
    throw new InvalidRequest(`seed is ${seed}; allowed: an integer, above 2^53 as a bigint`);
  }
  return BigInt(seed);
}

function encodeBeamSearch(beams: BeamSearch): MessageInitShape<typeof api.BeamSearchSchema> {
  checkNames("BeamSearch", beams, namesOf(api.BeamSearchSchema));
  const { earlyStopping, ...same } = given(beams);
  if (earlyStopping === undefined) return same;
  if (!Object.hasOwn(EARLY_STOPPING, earlyStopping)) {
    const allowed = Object.keys(EARLY_STOPPING).join(", ");
    throw new InvalidRequest(`earlyStopping is ${earlyStopping}; allowed: ${allowed}`);
  }
  return { ...same, earlyStopping: EARLY_STOPPING[earlyStopping] };
}

/** A part of a request; `deadlineMs` is what is left of the deadline. Throws InvalidRequest. */
export function encodeSchedulingParams(
  params: SchedulingParams,
  deadlineMs: number | undefined,
): GenerateRequestInit {
  checkNames("SchedulingParams", params, SCHEDULING_NAMES);
  const { deadlineMs: _, ...same } = given(params);
  return deadlineMs === undefined ? same : { ...same, deadline: durationOf(deadlineMs) };
}

function durationOf(ms: number): Duration {
  if (!Number.isFinite(ms)) {
    throw new InvalidRequest(`deadlineMs is ${ms}; allowed: a finite number above 0`);
  }
  const seconds = Math.trunc(ms / 1000);
  const nanos = Math.trunc((ms - seconds * 1000) * 1e6);
  return create(DurationSchema, { seconds: BigInt(seconds), nanos });
}

function namesOf(schema: DescMessage): ReadonlySet<string> {
  return new Set(schema.fields.map((field) => field.localName));
}

/** A misspelt name would otherwise go unnoticed: nothing of it would be sent. */
function checkNames(what: string, values: object, allowed: ReadonlySet<string>): void {
  for (const name of Object.keys(values)) {
    if (!allowed.has(name)) {
      throw new InvalidRequest(`${what} has no ${name}; allowed: ${[...allowed].join(", ")}`);
    }
  }
}

/** Without what is undefined, or null in untyped programs. */
function given<T extends object>(values: T): T {
  return Object.fromEntries(Object.entries(values).filter(([, value]) => value != null)) as T;
}

/** New tokens with their scores. */
export function decodeTokens(chunk: api.TokenChunk): Tokens {
  return {
    type: "tokens",
    tokenIds: chunk.tokenIds,
    logprobs: chunk.logprobs.map(decodeLogprob),
    promptLogprobs: chunk.promptLogprobs.map(decodeLogprob),
    index: chunk.index,
  };
}

function decodeLogprob({ tokenId, logprob, rank, top }: api.TokenLogprob): TokenLogprob {
  return { tokenId, logprob, rank, top: top.map((each) => ({ tokenId: each.tokenId, logprob: each.logprob })) };
}

/** The end of one of several sequences. Throws RequestFailed if it is none that we know. */
export function decodeSequenceFinish(finish: api.SequenceFinish): SequenceFinish {
  const reason = FINISH_REASONS.get(finish.reason);
  if (reason === undefined) {
    throw new RequestFailed(`a sequence ended for an unknown reason (${finish.reason})`);
  }
  const { index, stopTokenId, numOutputTokens, cumulativeLogprob, score } = finish;
  return given({ index, reason, stopTokenId, numOutputTokens, cumulativeLogprob, score }) as SequenceFinish;
}

/** The end of a request. Throws the error of a request that failed. */
export function decodeFinish(finish: api.Finish): Finish {
  const reason = FINISH_REASONS.get(finish.reason);
  if (reason === undefined) throw decodeError(finish.error);
  const { stopTokenId, usage } = finish;
  return {
    type: "finish",
    reason,
    ...(stopTokenId !== undefined && { stopTokenId }),
    usage: {
      numPromptTokens: usage?.numPromptTokens ?? 0,
      numOutputTokens: usage?.numOutputTokens ?? 0,
      numCachedTokens: usage?.numCachedTokens ?? 0,
      numPreemptions: usage?.numPreemptions ?? 0,
    },
  };
}

/** What a server said in-band. */
export function decodeError(error: api.RequestError | undefined): SplitserveError {
  return errorOfReason(error?.reason ?? "", error?.message ?? "", error?.retryDelay);
}

/** The model that is served. */
export function decodeModel(model: api.GetModelResponse): Model {
  const { name, digest, dtype, vocabSize, maxNumSequences, eosTokenIds } = model;
  const maxModelLen = model.maxModelLenTokens;
  const defaultSamplingParams = decodeRecommended(model.defaultSamplingParams);
  return { name, digest, dtype, vocabSize, maxModelLen, maxNumSequences, eosTokenIds, defaultSamplingParams };
}

/** Only these are ever recommended. */
function decodeRecommended(params: api.SamplingParams | undefined): SamplingParams {
  const { temperature, topK, topP, minP, repetitionPenalty } = params ?? {};
  return given({ temperature, topK, topP, minP, repetitionPenalty }) as SamplingParams;
}

/** One executor. */
export function decodeExecutor(state: ExecutorState): Executor {
  const info = state.executor;
  return {
    address: info?.address ?? "",
    executorEpoch: info?.executorEpoch ?? 0n,
    isConnected: state.connected,
    modelName: info?.model?.name ?? "",
    dtype: info?.model?.dtype ?? "",
    blockSize: info?.blockSizeTokens ?? 0,
    numDeviceBlocks: info?.numDeviceBlocks ?? 0,
    numFreeDeviceBlocks: state.numFreeDeviceBlocks,
    numCachedDeviceBlocks: state.numCachedDeviceBlocks,
    numHostBlocks: info?.numHostBlocks ?? 0,
    numFreeHostBlocks: state.numFreeHostBlocks,
    numWaitingRequests: state.numWaitingRequests,
    numRunningRequests: state.numRunningRequests,
    numSwappedRequests: state.numSwappedRequests,
    numSteps: state.numSteps,
    numPreemptions: state.numPreemptions,
  };
}
