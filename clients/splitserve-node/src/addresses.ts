// Which schedulers a client is given: a list of them, or what a DNS name stands for.

import { lookup } from "node:dns/promises";
import { isIPv6 } from "node:net";

import { InvalidRequest, ServerUnreachable } from "./errors.js";

/** More are a mistake. */
const MAX_SCHEDULERS = 64;
const ADDRESS = /^(\[[0-9A-Fa-f:.%\w]+\]|[^\s:,[\]/]+):(\d{1,5})$/;
const MAX_PORT = 65535;
const DNS = "dns:";
// A name server is not asked more often, nor waited for longer.
const FRESH_MS = 5000;
const TIMEOUT_MS = 5000;

/** Tells which schedulers there are. */
export interface Discovery {
  /** The name that all of them share, which their certificates have. */
  readonly host: string | undefined;
  /** `host:port` of each. Throws ServerUnreachable if nothing was ever known. */
  addresses(): Promise<readonly string[]>;
}

/** All addresses of a name; another server for each call is no use, so they are asked rarely. */
export type LookUp = (host: string) => Promise<readonly string[]>;

/** Whether it is `host:port`. */
export function isAddress(text: string): boolean {
  const port = ADDRESS.exec(text)?.[2];
  return port !== undefined && Number(port) <= MAX_PORT;
}

/** What `address` says if it names several; what else there is, gRPC understands. Throws InvalidRequest. */
export function discover(address: string, now: () => number): Discovery | undefined {
  const isName = address.startsWith(DNS) && !address.startsWith(`${DNS}/`) && !isAddress(address);
  if (isName && !address.includes(",")) {
    return new Named(checked([address.slice(DNS.length)])[0] ?? "", now);
  }
  return address.includes(",") ? listed(address.split(",")) : undefined;
}

/** Those that were given. Throws InvalidRequest. */
export function listed(addresses: readonly string[]): Discovery {
  const known = checked(addresses);
  return { host: undefined, addresses: async () => known };
}

/** All addresses of a DNS name. What it said last holds while it says nothing. */
export class Named implements Discovery {
  readonly host: string;
  readonly #port: string;
  readonly #now: () => number;
  readonly #lookUp: LookUp;
  #known: readonly string[] = [];
  #askedAt: number | undefined;
  #asking: Promise<void> | undefined;

  /** `name`: `host:port`. */
  constructor(name: string, now: () => number, lookUp: LookUp = resolve) {
    const colon = name.lastIndexOf(":");
    this.host = name.slice(0, colon);
    this.#port = name.slice(colon + 1);
    this.#now = now;
    this.#lookUp = lookUp;
  }

  async addresses(): Promise<readonly string[]> {
    const isFresh = this.#askedAt !== undefined && this.#now() - this.#askedAt < FRESH_MS;
    if (isFresh && this.#known.length > 0) return this.#known;
    this.#askedAt = this.#now();
    try {
      // One question at a time: a name server that says nothing is not asked by everybody.
      await inTime((this.#asking ??= this.#ask()));
    } catch (error) {
      if (this.#known.length > 0) return this.#known;
      throw new ServerUnreachable(`the schedulers are not known: ${DNS}${this.host}: ${error}`);
    }
    return this.#known;
  }

  async #ask(): Promise<void> {
    try {
      const found = await this.#lookUp(this.host.replace(/^\[|\]$/g, ""));
      this.#known = checked(found.map((host) => joined(host, this.#port)));
    } finally {
      this.#asking = undefined;
    }
  }
}

/** Each once. Throws InvalidRequest. */
function checked(addresses: readonly string[]): readonly string[] {
  const unusable = addresses.find((address) => !isAddress(address));
  if (unusable !== undefined) {
    throw new InvalidRequest(
      `the address ${JSON.stringify(unusable)} is not allowed; it takes host:port`,
    );
  }
  const known = [...new Set(addresses)];
  if (known.length < 1 || known.length > MAX_SCHEDULERS) {
    throw new InvalidRequest(`${known.length} schedulers; allowed: 1 to ${MAX_SCHEDULERS}`);
  }
  return known;
}

async function resolve(host: string): Promise<readonly string[]> {
  return (await lookup(host, { all: true })).map(({ address }) => address);
}

function joined(host: string, port: string): string {
  return isIPv6(host) ? `[${host}]:${port}` : `${host}:${port}`;
}

async function inTime(asking: Promise<void>): Promise<void> {
  let timer: NodeJS.Timeout | undefined;
  const tooLate = new Promise<never>((_, fail) => {
    timer = setTimeout(() => fail(new Error(`no answer within ${TIMEOUT_MS} ms`)), TIMEOUT_MS);
  });
  try {
    await Promise.race([asking, tooLate]);
  } finally {
    clearTimeout(timer);
  }
}
