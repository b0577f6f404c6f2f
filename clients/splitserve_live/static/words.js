// Words for the numbers of the feed, and sentences that say why a request waits.

export const BLOCK_STATES = ["free", "held", "shared", "cached", "given back", "on the move"];
export const BLOCK_MEANINGS = [
  "free and empty",
  "held by one sequence",
  "shared by several sequences",
  "cached: free, reusable by its content",
  "given back: free after the steps in flight",
  "on the move: copied or swapped",
];
// The mark below a step.
export const MOVE_MEANING = "mark below: the step moved blocks";
export const ROW_KINDS = ["", "prompt", "decode", "drafts", "run"];
export const ROW_MEANINGS = [
  "",
  "part of a prompt",
  "one token",
  "draft tokens, verified",
  "several tokens by run-ahead",
];

const SENTENCES = {
  turn: "it is scheduled in one of the next steps",
  executor: "no executor is connected",
  fitting_executor: "it can never run there",
  blocks: "there are too few free blocks",
  rows: "there is no free row",
  bytes: "sampling parameters fill their memory",
  share: "its tenant has used its share while others wait",
  adapter_slot: "there is no free slot for its adapter",
  adapter_load: "its adapter is being loaded",
  budget: "rows and prompts ahead of it use the token budget of the next step",
  results: "steps in flight still include it",
  open_executor: "the executor accepts no requests for now",
  others_first: "other requests waiting there go first",
};

export function why(reason) {
  return reason.needed
    ? `it needs ${reason.needed} blocks, and ${reason.free} ${reason.free === 1 ? "is" : "are"} free`
    : (SENTENCES[reason.lack] ?? `it waits for ${reason.lack}`);
}

export const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

export const number = (value) => value.toLocaleString("en-US");

// Formats a percentage; shows 0 % and 100 % for exact values only.
export function share(part, whole) {
  const percent = Math.round((100 * part) / whole);
  if (part && percent === 0) return "<1 %";
  if (part < whole && percent === 100) return ">99 %";
  return `${percent} %`;
}

export function duration(ms) {
  if (ms < 1) return `${Math.round(ms * 1000)} µs`;
  if (ms < 1000) return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(1)} s`;
  return `${Math.floor(ms / 60_000)} min ${Math.round((ms % 60_000) / 1000)} s`;
}
