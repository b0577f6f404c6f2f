// The credential that calls bring along.

import { Metadata } from "@grpc/grpc-js";

import { InvalidRequest } from "./errors.js";

/** An API key or a JWT; a function is asked for each call, and may read it from a file. */
export type ApiKey = string | (() => string);

// As much as a header may have with most servers.
const MAX_CHARS = 8192;

/** What a call brings along. Throws InvalidRequest, which does not show the key. */
export function metadataOf(apiKey: ApiKey | undefined): Metadata {
  const metadata = new Metadata();
  if (apiKey === undefined) return metadata;
  const text = typeof apiKey === "string" ? apiKey : apiKey();
  if (!/^[!-~]+$/.test(text) || text.length > MAX_CHARS) {
    throw new InvalidRequest(
      `apiKey is no credential: it has ${text.length} characters; allowed: 1 to ${MAX_CHARS}, of ASCII, without spaces`,
    );
  }
  metadata.set("authorization", `Bearer ${text}`);
  return metadata;
}
