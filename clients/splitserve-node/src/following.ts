// Where a client goes on when its scheduler stops and names others. What a scheduler says decides
// neither how a client is secured nor who gets its credential: docs/security.md.

import { BlockList, isIP } from "node:net";

import { isAddress } from "./addresses.js";

/** One that stops may name one that stops, and so on. */
export const MAX_HOPS = 4;
// No more are looked at.
const MAX_NAMED = 8;

// Resolvers read `127.1`, `2130706433` and `0x7f.1` as addresses: a name does not end in a number.
const NAME = /^([a-z0-9_-]+\.)*(?!\d+$|0x[0-9a-f]*$)[a-z0-9_-]+$/;
// Before a colon gRPC takes these for ways to find an address: `unix:1` is a socket of this machine.
const SCHEMES = new Set([
  "dns",
  "ipv4",
  "ipv6",
  "unix",
  "unix-abstract",
  "vsock",
  "xds",
  "google-c2p",
]);

const LOOPBACK = new BlockList();
LOOPBACK.addSubnet("127.0.0.0", 8, "ipv4");
LOOPBACK.addAddress("::1", "ipv6");

const LOCAL = new BlockList();
LOCAL.addSubnet("127.0.0.0", 8, "ipv4");
LOCAL.addAddress("::1", "ipv6");
LOCAL.addAddress("0.0.0.0", "ipv4");
LOCAL.addAddress("::", "ipv6");
LOCAL.addSubnet("169.254.0.0", 16, "ipv4");
LOCAL.addSubnet("fe80::", 10, "ipv6");

/** Who asks where it may go. */
export interface Traveller {
  /** Whether calls bring an API key or a JWT. */
  readonly hasCredential: boolean;
  /** Whether an authority of the operator's own certifies whoever it connects to. */
  readonly isVouched: boolean;
}

/** Those of `named`, which the scheduler at `address` said, where a client may go. */
export function allowed(
  address: string,
  named: readonly string[],
  { hasCredential, isVouched }: Traveller,
): string[] {
  const host = hostOf(address);
  const isHere = isLoopback(host);
  return [...new Set(named.slice(0, MAX_NAMED))].filter((each) => {
    const other = hostOf(each);
    return (
      isAddress(each) &&
      isPlain(other) &&
      (other === host || !hasCredential || isVouched) &&
      // Nobody sends us to our own machine, but for whoever is there.
      (isHere || !isLocal(other))
    );
  });
}

/** As whoever resolves it sees it. */
function hostOf(address: string): string {
  const host = address.slice(0, Math.max(address.lastIndexOf(":"), 0));
  return host
    .replace(/^\[+|\]+$/g, "")
    .toLowerCase()
    .replace(/\.$/, "");
}

/** Whether it is an IP address or a name, and nobody takes it for anything else. */
function isPlain(host: string): boolean {
  // gRPC decodes what follows a `%`; zones have only addresses of this link.
  if (host.includes("%")) return false;
  return isIP(host) !== 0 || (NAME.test(host) && !SCHEMES.has(host));
}

function isLoopback(host: string): boolean {
  return host === "localhost" || isAmong(LOOPBACK, host);
}

/** Whether it is this machine or this link; what names resolve to is not looked at. */
function isLocal(host: string): boolean {
  return host === "localhost" || host.endsWith(".localhost") || isAmong(LOCAL, host);
}

function isAmong(addresses: BlockList, host: string): boolean {
  const version = isIP(host);
  return version !== 0 && addresses.check(host, version === 4 ? "ipv4" : "ipv6");
}
