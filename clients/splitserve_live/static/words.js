// What numbers of the feed are called, and why a request waits, as a sentence.

export const BLOCK_STATES = ["free", "held", "shared", "cached", "given back", "on the move"];
export const BLOCK_MEANINGS = [
  "free: holds nothing",
  "held by one sequence",
  "shared by several",
  "cached: free, found by what it holds",
  "given back: free after the steps in flight",
  "on the move: copied or swapped",
];
// The mark below a step.
export const MOVE_MEANING = "mark below: it moved blocks";
export const ROW_KINDS = ["", "prompt", "decode", "drafts", "run"];
export const ROW_MEANINGS = [
  "",
  "part of a prompt",
  "one token",
  "guesses of tokens, verified",
  "several tokens by running on",
];

const SENTENCES = {
  turn: "its turn comes with one of the next steps",
  executor: "no executor is connected",
  fitting_executor: "it can never run there",
  blocks: "there are too few free blocks",
  rows: "there is no free row",
  bytes: "parameters of sampling take all of their memory",
  share: "its tenant has its share while others wait",
  adapter_slot: "there is no slot for its adapter",
  budget: "rows and prompts before it take the tokens of the next step",
  results: "steps in flight concern it",
  open_executor: "the executor takes nobody for now",
  others_first: "others that wait there go first",
};

export function why(reason) {
  return reason.needed
    ? `it needs ${reason.needed} blocks, and ${reason.free} ${reason.free === 1 ? "is" : "are"} free`
    : (SENTENCES[reason.lack] ?? `it lacks ${reason.lack}`);
}

export const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

export const number = (value) => value.toLocaleString("en-US");

// Nothing is 0 % but nothing, and nothing is 100 % but all.
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
