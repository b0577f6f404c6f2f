// Where a client goes that a scheduler sends away: the cases are those of tests/unit/client/test_following.py.

import assert from "node:assert/strict";
import { test } from "node:test";

import { allowed } from "../dist/following.js";

const OWN = "10.0.0.5:50051";
const SIBLING = "10.0.0.5:50061";
const OTHER = "10.0.0.6:50051";
const many = Array.from({ length: 20 }, (_, number) => `10.0.1.${number}:1`);

const CASES: [string[], boolean, boolean, string[]][] = [
  [[OTHER, SIBLING], false, false, [OTHER, SIBLING]],
  // Its key goes to no other host, unless the operator's own authority certifies that.
  [[OTHER, SIBLING], true, false, [SIBLING]],
  [[OTHER, SIBLING], true, true, [OTHER, SIBLING]],
  // Services of the client's own machine, and what clouds tell there.
  [["127.0.0.1:80", "localhost:80", "[::1]:80", "169.254.169.254:80"], false, true, []],
  [["", "x", "10.0.0.6", "10.0.0.6:0x50", "10.0.0.6:99999", "a b:1"], false, true, []],
  [[OTHER, OTHER, OTHER], false, false, [OTHER]],
  [many, false, false, many.slice(0, 8)],
];
for (const [named, hasCredential, isVouched, expected] of CASES) {
  test(`of ${named.slice(0, 4).join(" ")} some are followed (${hasCredential}, ${isVouched})`, () => {
    assert.deepEqual(allowed(OWN, named, { hasCredential, isVouched }), expected);
  });
}

const OWN_MACHINE = [
  ...["0.0.0.0", "[::]", "[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::ffff:169.254.1.1]"],
  ...["[::ffff:0.0.0.0]", "[fe80::1%eth0]", "[2001:db8::1%eth0]", "[::ffff:7f00%3A1]"],
  ...["127.1", "127.0.0.1.", "0177.0.0.1", "2130706433", "0x7f000001", "0x7f.1", "127.0.0.0x1"],
  ...["LOCALHOST", "localhost.", "x.Localhost", "[localhost]", "%6cocalhost", "l\uff4fcalhost"],
  ...["unix", "unix-abstract", "dns", "vsock", ".", "a..b"],
];
for (const host of OWN_MACHINE) {
  test(`nobody is sent to ${host}`, () => {
    assert.deepEqual(allowed(OWN, [`${host}:80`], { hasCredential: false, isVouched: true }), []);
  });
}

const PLAIN = [
  ...["scheduler", "scheduler-2", "scheduler_2", "a.example.", "A.example", "3com.example", "10a"],
  ...["10.0.0.6", "[2001:db8::1]", "[::ffff:10.0.0.6]"],
];
for (const host of PLAIN) {
  test(`${host} is a host to go to`, () => {
    const named = [`${host}:80`];
    assert.deepEqual(allowed(OWN, named, { hasCredential: false, isVouched: true }), named);
  });
}

test("whoever is on the machine of its scheduler goes on there", () => {
  const named = ["127.0.0.1:50061"];
  const who = { hasCredential: true, isVouched: false };
  assert.deepEqual(allowed("127.0.0.1:50051", named, who), named);
});
