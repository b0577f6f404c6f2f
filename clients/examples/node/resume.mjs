// Streams a completion from a scheduler, and resumes it when the stream breaks.
//
//   node resume.mjs [ADDRESS]
//
// Rules of resumption: protos/splitserve/scheduler/v1/scheduler.proto (Generate) and
// docs/client.md ("Resuming").

import { randomBytes } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";

import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

const GIVE_UP_AFTER_MS = 60_000;
const MAX_DELAY_MS = 1_000;

// Stubs, generated at run time from the protos of this repository.
const definitions = loadSync("splitserve/scheduler/v1/scheduler.proto", {
  includeDirs: [fileURLToPath(new URL("../../../protos", import.meta.url))],
  keepCase: true,
  longs: String, // a seed has 64 bits, a number of JavaScript has 53
  enums: String,
  defaults: true,
  oneofs: true,
});
const { SchedulerService } = grpc.loadPackageDefinition(definitions).splitserve.scheduler.v1;

/** Connects to one scheduler, in plain text. */
function connect(address) {
  return new SchedulerService(address, grpc.credentials.createInsecure(), {
    "grpc.keepalive_time_ms": 10_000, // detects a scheduler that vanished silently
    "grpc.max_reconnect_backoff_ms": MAX_DELAY_MS,
    "grpc.enable_retries": 0, // `generate` retries, with the tokens received
  });
}

/**
 * Yields each output token id of `request` once, and returns its Finish message.
 *
 * Calls again with the tokens received when a stream breaks, for at most a minute without a new
 * token. Throws the gRPC error of a refusal, and the error of a request that failed. Leaving the
 * loop aborts the request.
 */
export async function* generate(client, request) {
  // A resumed stream continues the same tokens only with the same seed.
  const seed = randomBytes(8).readBigInt64BE().toString();
  const sampling_params = { seed, ...request.sampling_params };
  const received = [];
  let lastProgress = performance.now();
  let delayMs = 100;
  for (;;) {
    const stream = client.Generate({ ...request, sampling_params, resume_token_ids: received });
    try {
      for await (const { event, tokens, finish } of stream) {
        if (event === "finish") {
          if (finish.error) throw new Error(`${finish.error.reason}: ${finish.error.message}`);
          return finish;
        }
        lastProgress = performance.now();
        delayMs = 100;
        for (const tokenId of tokens.token_ids) {
          received.push(tokenId);
          yield tokenId;
        }
      }
      throw new Error("the stream ended without a finish");
    } catch (error) {
      const isOver = performance.now() + delayMs - lastProgress > GIVE_UP_AFTER_MS;
      if (!isBroken(error) || isOver) throw error;
      console.error(`the stream broke after ${received.length} tokens: ${error.message}`);
    } finally {
      stream.cancel(); // no effect on a stream that has ended
    }
    await sleep(delayMs);
    delayMs = Math.min(2 * delayMs, MAX_DELAY_MS);
  }
}

/** Returns whether `error` broke the stream, rather than refused the request. */
function isBroken(error) {
  const { UNAVAILABLE, CANCELLED, UNKNOWN, INTERNAL } = grpc.status;
  if (error.code === UNAVAILABLE) return true; // also a scheduler that drains
  // Errors of the service have details (ErrorInfo); errors of the connection have none.
  const isOfService = error.metadata?.get("grpc-status-details-bin").length > 0;
  return [CANCELLED, UNKNOWN, INTERNAL].includes(error.code) && !isOfService;
}

async function main(address) {
  const client = connect(address);
  try {
    const request = { prompt_token_ids: [1, 2, 3], sampling_params: { seed: 5, max_tokens: 8 } };
    const events = generate(client, request);
    let next = await events.next();
    for (; !next.done; next = await events.next()) console.log(`token ${next.value}`);
    console.log(`${next.value.reason}, ${next.value.usage.num_output_tokens} tokens`);
  } finally {
    client.close();
  }
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  await main(process.argv[2] ?? "127.0.0.1:50051");
}
