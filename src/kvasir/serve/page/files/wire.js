// Converts the page's messages to those of the chat API, and the chunks of a response to a message of the page.

import { withFiles } from "./attachments.js";

/** The messages in the API's format. Answers without content are left out, and whole turns that were too long. The chat
 *  template decides whether reasoning is kept. */
export function wireMessages(system, messages) {
  const found = system ? [{ role: "system", content: system }] : [];
  for (const m of messages) {
    if (m.tooLong) dropTurn(found);
    if (m.role === "assistant" && !m.content && !m.calls?.length) continue;
    const message = { role: m.role, content: withFiles(m.content, m.files) };
    if (m.tool_call_id) message.tool_call_id = m.tool_call_id;
    if (m.reasoning) message.reasoning_content = m.reasoning;
    if (m.calls?.length) message.tool_calls = m.calls;
    found.push(message);
  }
  return found;
}

const CHAT_ONLY = ["logprobs", "top_logprobs", "tools", "chat_template_kwargs", "timings_per_token"];
const COMPLETION_TOKENS = 256; // a text has no natural end

/** The path and the body of a request for the next message. */
export function requestOf(isCompletion, system, messages, fields) {
  if (!isCompletion) return ["/v1/chat/completions", { ...fields, messages: wireMessages(system, messages) }];
  const others = Object.entries(fields).filter(([name]) => !CHAT_ONLY.includes(name));
  const prompt = messages.map((message) => withFiles(message.content, message.files)).join("");
  return ["/v1/completions", { max_tokens: COMPLETION_TOKENS, ...Object.fromEntries(others), prompt }];
}

/** Removes the last message of the user, and all that follow. */
function dropTurn(messages) {
  const last = messages.findLastIndex((message) => message.role === "user");
  if (last >= 0) messages.length = last;
}

/** Records the engine's timings so far: the arrival of chunks says little about the speed of generation. */
export function time(message, { prompt_ms: prompt, predicted_ms: predicted, predicted_n: tokens }) {
  message.first ??= prompt / 1000;
  message.tokens ??= tokens; // those of the first chunk
  if (predicted > 0 && tokens > message.tokens) message.rate = (1000 * (tokens - message.tokens)) / predicted;
}

/** Adds a choice of a chunk to the message. */
export function take(message, choice, map) {
  const delta = choice.delta ?? { content: choice.text };
  if (choice.logprobs?.content && map) map.addTokens(choice.logprobs.content);
  const reasoning = delta.reasoning_content ?? delta.reasoning;
  if (reasoning) {
    message.reasoning = (message.reasoning ?? "") + reasoning;
    map?.addText("reasoning", reasoning);
  }
  if (delta.content) {
    message.content += delta.content;
    map?.addText("content", delta.content);
  }
  for (const call of delta.tool_calls ?? []) {
    message.calls ??= [];
    const known = (message.calls[call.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    known.id ||= call.id ?? "";
    known.function.name += call.function?.name ?? "";
    known.function.arguments += call.function?.arguments ?? "";
  }
  if (choice.finish_reason) message.finish = choice.finish_reason;
  if (choice.seed !== undefined) message.seed = choice.seed;
}
