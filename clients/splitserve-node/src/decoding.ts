// Protobuf messages to the client's values.

import { errorOfReason, RequestFailed, type SplitserveError } from "./errors.js";
import type { ExecutorState } from "./gen/splitserve/scheduler/v1/admin_pb.js";
import * as api from "./gen/splitserve/scheduler/v1/scheduler_pb.js";
import { given } from "./given.js";
import type {
  Executor,
  Finish,
  FinishReason,
  Model,
  Readiness,
  SamplingParams,
  SequenceFinish,
  TokenLogprob,
  Tokens,
} from "./types.js";

const FINISH_REASONS: ReadonlyMap<api.FinishReason, FinishReason> = new Map([
  [api.FinishReason.STOP, "stop"],
  [api.FinishReason.LENGTH, "length"],
  [api.FinishReason.MODEL_LENGTH, "model_length"],
  [api.FinishReason.ABORTED, "aborted"],
]);

const READINESS: ReadonlyMap<api.Readiness, Readiness> = new Map([
  [api.Readiness.READY, "ready"],
  [api.Readiness.NO_EXECUTOR, "no_executor"],
  [api.Readiness.NO_PROGRESS, "no_progress"],
  [api.Readiness.DRAINING, "draining"],
  [api.Readiness.EXECUTORS_FAILING, "executors_failing"],
]);

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
  return {
    tokenId,
    logprob,
    rank,
    top: top.map((each) => ({ tokenId: each.tokenId, logprob: each.logprob })),
  };
}

/** The end of one of several sequences. Throws RequestFailed if it is none that we know. */
export function decodeSequenceFinish(finish: api.SequenceFinish): SequenceFinish {
  const reason = FINISH_REASONS.get(finish.reason);
  if (reason === undefined) {
    throw new RequestFailed(`a sequence ended for an unknown reason (${finish.reason})`);
  }
  const { index, stopTokenId, numOutputTokens, cumulativeLogprob, score } = finish;
  return given({
    index,
    reason,
    stopTokenId,
    numOutputTokens,
    cumulativeLogprob,
    score,
  }) as SequenceFinish;
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
  return errorOfReason(
    error?.reason ?? "",
    error?.message ?? "",
    error?.retryDelay,
    error?.schedulers,
  );
}

/** The model that is served. */
export function decodeModel(model: api.GetModelResponse): Model {
  const { name, digest, dtype, vocabSize, maxNumSequences, eosTokenIds } = model;
  const maxModelLen = model.maxModelLenTokens;
  const defaultSamplingParams = decodeRecommended(model.defaultSamplingParams);
  return {
    name,
    digest,
    dtype,
    vocabSize,
    maxModelLen,
    maxNumSequences,
    eosTokenIds,
    defaultSamplingParams,
    readiness: READINESS.get(model.readiness) ?? "unknown",
  };
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
    isDraining: state.draining,
    isFailing: state.failing,
    isWithdrawn: state.withdrawn,
  };
}
