// What a session sends.

import type { Connection } from "./connection.js";
import { encode, type GenerateRequestInit } from "./encoding.js";
import { InvalidRequest } from "./errors.js";
import {
  SchedulerService,
  SessionRequestSchema,
} from "./gen/splitserve/scheduler/v1/scheduler_pb.js";

// Every server takes a message of this size.
const SMALL_MESSAGE_BYTES = 256 * 1024;

/** Throws InvalidRequest for what cannot be encoded. */
export function submitMessage(handle: number, request: GenerateRequestInit): Buffer {
  return encode(SessionRequestSchema, { action: { case: "submit", value: { handle, request } } });
}

export function abortMessage(handle: number): Buffer {
  return encode(SessionRequestSchema, { action: { case: "abort", value: { handle } } });
}

/**
 * Throws InvalidRequest for what would end a session for all its requests. If the server does not
 * say what it takes, it is for it to refuse.
 */
export async function checkSize(
  message: Buffer,
  connection: Connection,
  signal: AbortSignal,
): Promise<void> {
  if (message.length <= SMALL_MESSAGE_BYTES) return;
  const asking = connection.unary(SchedulerService.method.getModel, {}, signal);
  const limit = await asking.then(
    (model) => Number(model.maxMessageBytes),
    () => 0,
  );
  if (limit > 0 && message.length > limit) {
    const said = `the request has ${message.length} bytes; the server takes at most ${limit}`;
    throw new InvalidRequest(said, { reason: "MESSAGE_TOO_LARGE" });
  }
}
