// An empty conversation: what the model is, and examples of what to write.

import { make } from "./dom.js";
import { count } from "./tiles.js";

const MESSAGES = [
  "Tell me a short story about a fox.",
  "What is 23 + 45?",
  "Write a Python function that reverses a list.",
  "Explain in three sentences how a rainbow forms.",
];
const BEGINNINGS = ["Once upon a time, there was a", "def fibonacci(n):", "The capital of France is"];

/** info: of the model; write: puts a text into the composer. */
export function welcome(info, isCompletion, write) {
  const generates = info.tasks?.includes("generate") ?? true;
  const examples = !generates ? [] : isCompletion ? BEGINNINGS : MESSAGES;
  const button = (text) => make("button", { type: "button", onclick: () => write(text) }, text);
  return make(
    "div",
    { class: "welcome" },
    make("h1", {}, info.model ?? "Kvasir"),
    make("p", { class: "muted" }, facts(info).join(" · ")),
    make("p", { class: "muted" }, lead(generates, isCompletion)),
    make("div", { class: "examples" }, examples.map(button)),
  );
}

function lead(generates, isCompletion) {
  if (!generates) return "This model computes embeddings or scores; it writes no text.";
  return isCompletion ? "The model continues your text. Write a beginning:" : "Send a message to start, for example:";
}

function facts({ parameters, max_model_len: context, dtype, device, executor, grade }) {
  const found = [];
  if (parameters) found.push(`${size(parameters)} parameters`);
  if (context) found.push(`context of ${count(context)} tokens`);
  if (dtype) found.push(`computes in ${dtype}`);
  if (device) found.push(device.toUpperCase());
  if (executor) found.push(`${executor} executor`);
  if (grade === "exact") found.push("exact");
  return found;
}

function size(parameters) {
  const [unit, name] = parameters >= 1e9 ? [1e9, " billion"] : [1e6, " million"];
  return `${+(parameters / unit).toPrecision(2)}${name}`;
}
