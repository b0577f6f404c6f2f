// The client's values to protobuf messages.

import { create, toBinary, type DescMessage, type MessageInitShape } from "@bufbuild/protobuf";
import { DurationSchema, type Duration } from "@bufbuild/protobuf/wkt";

import { InvalidRequest } from "./errors.js";
import * as api from "./gen/splitserve/scheduler/v1/scheduler_pb.js";
import { given } from "./given.js";
import type {
  BeamSearch,
  Grammar,
  RequestOptions,
  SamplingParams,
  SchedulingParams,
  TokenIds,
  TraceContext,
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

const SCHEDULING_NAMES: ReadonlySet<string> = new Set([
  "priority",
  "tenant",
  "deadlineMs",
  "adapter",
  "cacheSalt",
  "bypassPrefixCache",
  "numPublicPrefixTokens",
] satisfies (keyof SchedulingParams)[]);

const OPTION_NAMES: ReadonlySet<string> = new Set([
  "requestId",
  "resumeTokenIds",
  "scheduling",
  "encoderTokenIds",
  "modelDigest",
  "traceContext",
  "signal",
] satisfies (keyof RequestOptions)[]);

const TRACE_NAMES: ReadonlySet<string> = new Set([
  "traceparent",
  "tracestate",
] satisfies (keyof TraceContext)[]);

const GRAMMAR_NAMES = new Set(api.GrammarSchema.fields.map((field) => field.localName));

/** Throws InvalidRequest for an option that is none. */
export function checkOptions(options: RequestOptions): void {
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
  const { seed, beamSearch, badWordsTokenIds, grammar, ...same } = given(params);
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
    ...(grammar !== undefined && { grammar: encodeGrammar(grammar) }),
  };
}

function encodeSeed(seed: bigint | number): bigint {
  if (typeof seed !== "bigint" && !Number.isSafeInteger(seed)) {
    throw new InvalidRequest(`seed is ${seed}; allowed: an integer, above 2^53 as a bigint`);
  }
  return BigInt(seed);
}

function encodeGrammar(grammar: Grammar): MessageInitShape<typeof api.GrammarSchema> {
  const [name, ...more] = Object.keys(given(grammar));
  if (name === undefined || more.length > 0 || !GRAMMAR_NAMES.has(name)) {
    throw new InvalidRequest(`grammar is not one of: ${[...GRAMMAR_NAMES].join(", ")}`);
  }
  if ("regex" in grammar) return { kind: { case: "regex", value: grammar.regex } };
  if ("lark" in grammar) return { kind: { case: "lark", value: grammar.lark } };
  if ("choices" in grammar) {
    return { kind: { case: "choices", value: { texts: [...grammar.choices] } } };
  }
  const { jsonSchema } = grammar;
  const value = typeof jsonSchema === "string" ? jsonSchema : JSON.stringify(jsonSchema);
  return { kind: { case: "jsonSchema", value } };
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
  if (deadlineMs === undefined) return same;
  return { ...same, deadline: durationOf("deadlineMs", deadlineMs, "a finite number above 0") };
}

/** A part of a request. Throws InvalidRequest for a name that is none. */
export function encodeTraceContext(context: TraceContext): GenerateRequestInit {
  checkNames("TraceContext", context, TRACE_NAMES);
  return given(context);
}

/** Throws InvalidRequest for what is no duration; `name`: the option that it comes from. */
export function durationOf(name: string, ms: number, allowed: string): Duration {
  if (!Number.isFinite(ms)) throw new InvalidRequest(`${name} is ${ms}; allowed: ${allowed}`);
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
