// Which of several schedulers a client asks, and where it finds them: no network.

import assert from "node:assert/strict";
import { test } from "node:test";

import { InvalidRequest, ServerUnreachable } from "splitserve";
import { discover, listed, Named, type Discovery } from "../dist/addresses.js";
import type { Channel } from "../dist/channel.js";
import { Draining } from "../dist/errors.js";
import { Schedulers } from "../dist/schedulers.js";

const LIVE = new AbortController().signal;

/** A channel that is known by its address alone. */
interface FakeChannel {
  readonly address: string;
  isClosed: boolean;
}

class Fleet {
  /** What each says; one that is not here cannot be reached. */
  readonly serves = new Map<string, boolean>();
  readonly probed: string[] = [];
  readonly opened: FakeChannel[] = [];
  nowMs = 0;
  readonly schedulers: Schedulers;

  constructor(discovery: Discovery) {
    this.schedulers = new Schedulers({
      discovery,
      now: () => this.nowMs,
      shuffle: (addresses) => addresses,
      open: (address) => {
        const channel = { address, isClosed: false, close: () => (channel.isClosed = true) };
        this.opened.push(channel);
        return channel as unknown as Channel;
      },
      isServing: async (channel) => {
        const { address } = channel as unknown as FakeChannel;
        this.probed.push(address);
        const serves = this.serves.get(address);
        if (serves === undefined) throw new ServerUnreachable(`${address} is gone`);
        return serves;
      },
    });
  }

  async choose(): Promise<string> {
    return ((await this.schedulers.choose(LIVE)) as unknown as FakeChannel).address;
  }

  /** A call to the one at `address` failed. */
  fail(address: string, error: Error): void {
    const channel = this.opened.find((each) => each.address === address);
    this.schedulers.noteFailure(channel as unknown as Channel, error);
  }
}

test("a client stays with the scheduler that it has, and looks at it once a second", async () => {
  const fleet = new Fleet(listed(["a:1", "b:1"]));
  fleet.serves.set("a:1", true).set("b:1", true);

  assert.deepEqual(await Promise.all([fleet.choose(), fleet.choose()]), ["a:1", "a:1"]);
  fleet.nowMs = 999;
  await fleet.choose();
  assert.deepEqual(fleet.probed, ["a:1"]);
  fleet.nowMs = 1000;
  assert.equal(await fleet.choose(), "a:1");
  assert.deepEqual(fleet.probed, ["a:1", "a:1"]);
});

test("a client leaves one that is gone, and one that has no executor", async () => {
  const fleet = new Fleet(listed(["a:1", "b:1", "c:1"]));
  fleet.serves.set("b:1", false).set("c:1", true);
  assert.equal(await fleet.choose(), "c:1");

  fleet.serves.set("c:1", false).set("a:1", true);
  fleet.fail("c:1", new ServerUnreachable("it broke"));
  assert.equal(await fleet.choose(), "a:1");
});

test("a client asks one that does not serve where no other does", async () => {
  const fleet = new Fleet(listed(["a:1", "b:1"]));
  fleet.serves.set("b:1", false);
  assert.equal(await fleet.choose(), "b:1");
});

test("a client leaves one that stops, though no other serves yet", async () => {
  const fleet = new Fleet(listed(["a:1", "b:1"]));
  fleet.serves.set("a:1", true).set("b:1", false);
  assert.equal(await fleet.choose(), "a:1");

  fleet.serves.set("a:1", false);
  fleet.fail("a:1", new Draining("it stops"));
  assert.equal(await fleet.choose(), "b:1");
});

test("it says why when no scheduler can be reached, and looks again", async () => {
  const fleet = new Fleet(listed(["a:1", "b:1"]));
  await assert.rejects(fleet.choose(), ServerUnreachable);
  fleet.serves.set("b:1", true);
  assert.equal(await fleet.choose(), "b:1");
});

test("who is gone from the list is left, and its channel closed", async () => {
  let known = ["a:1", "b:1"];
  const fleet = new Fleet({ host: undefined, addresses: async () => known });
  fleet.serves.set("a:1", true).set("b:1", true);
  assert.equal(await fleet.choose(), "a:1");

  known = ["b:1"];
  fleet.nowMs = 1000;
  assert.equal(await fleet.choose(), "b:1");
  fleet.nowMs = 2000;
  assert.equal(await fleet.choose(), "b:1");
  assert.deepEqual(
    fleet.opened.map(({ isClosed }) => isClosed),
    [true, false],
  );
});

test("whoever waits for a scheduler leaves at their signal, and the others do not", async () => {
  let answer!: (addresses: string[]) => void;
  const asked = new Promise<string[]>((resolve) => (answer = resolve));
  const fleet = new Fleet({ host: undefined, addresses: () => asked });
  fleet.serves.set("a:1", true);
  const leaving = new AbortController();
  const left = fleet.schedulers.choose(leaving.signal);
  const stays = fleet.choose();

  leaving.abort(new Error("enough"));
  await assert.rejects(left, /enough/);
  answer(["a:1"]);
  assert.equal(await stays, "a:1");
});

test("a name is looked up again after a while, and holds while nobody answers", async () => {
  let [nowMs, found] = [0, ["10.0.0.2", "2001:db8::1"]];
  let lookUp = async (): Promise<string[]> => found;
  const named = new Named(
    "fleet.example:50051",
    () => nowMs,
    (host) => {
      assert.equal(host, "fleet.example");
      return lookUp();
    },
  );

  assert.deepEqual(await named.addresses(), ["10.0.0.2:50051", "[2001:db8::1]:50051"]);
  assert.equal(named.host, "fleet.example");
  found = ["10.0.0.3"];
  nowMs = 4999;
  assert.equal((await named.addresses()).length, 2);
  nowMs = 5000;
  assert.deepEqual(await named.addresses(), ["10.0.0.3:50051"]);
  lookUp = () => Promise.reject(new Error("no such name"));
  nowMs = 10_000;
  assert.deepEqual(await named.addresses(), ["10.0.0.3:50051"]);
});

test("a name that nobody knows is said, and asked for again", async () => {
  let lookUp = (): Promise<string[]> => Promise.reject(new Error("no such name"));
  const named = new Named(
    "fleet.example:1",
    () => 0,
    () => lookUp(),
  );
  await assert.rejects(named.addresses(), (error) => {
    assert.ok(error instanceof ServerUnreachable);
    assert.match(error.message, /dns:fleet\.example.*no such name/);
    return true;
  });
  lookUp = async () => ["10.0.0.3"];
  assert.deepEqual(await named.addresses(), ["10.0.0.3:1"]);
});

test("a list takes names and addresses, each once; a name and what gRPC understands are no list", async () => {
  const now = (): number => 0;
  const given = ["one.example:1", "[::1]:2", "10.0.0.1:3"];
  const known = discover([...given, "one.example:1"].join(), now);
  assert.deepEqual(await known?.addresses(), given);
  assert.equal(discover("dns:one.example:1", now)?.host, "one.example");
  for (const one of ["one.example:1", "dns:1", "dns:///one.example:1", "unix:/tmp/socket"]) {
    assert.equal(discover(one, now), undefined);
  }
});

for (const address of [
  "one.example,two.example:2",
  "one.example:1,",
  "one:70000,two:2",
  "dns:one.example",
  "dns:one.example:1,two:2",
  Array.from({ length: 65 }, (_, number) => `host-${number}:1`).join(),
]) {
  test(`${address.slice(0, 30)} is refused`, () => {
    assert.throws(() => discover(address, () => 0), InvalidRequest);
  });
}
