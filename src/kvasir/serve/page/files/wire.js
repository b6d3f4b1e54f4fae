// A conversation as the chat API takes it, and its chunks as a message of the page.

/** The messages as the API takes them. What failed or never began is left out, and the whole turn where it was too long;
 *  thoughts are the template's to keep or to drop. */
export function wireMessages(system, messages) {
  const found = system ? [{ role: "system", content: system }] : [];
  for (const m of messages) {
    if (m.tooLong) dropTurn(found);
    if (m.role === "assistant" && !m.content && !m.calls?.length) continue;
    const message = { role: m.role, content: m.content };
    if (m.tool_call_id) message.tool_call_id = m.tool_call_id;
    if (m.reasoning) message.reasoning_content = m.reasoning;
    if (m.calls?.length) message.tool_calls = m.calls;
    found.push(message);
  }
  return found;
}

/** Takes the last question away, and what came after it. */
function dropTurn(messages) {
  const last = messages.findLastIndex((message) => message.role === "user");
  if (last >= 0) messages.length = last;
}

/** Takes the engine's times so far into the message: the arrival of chunks here shows little of how fast they were made. */
export function time(message, { prompt_ms: prompt, predicted_ms: predicted, predicted_n: tokens }) {
  message.first ??= prompt / 1000;
  message.tokens ??= tokens; // those that were there first
  if (predicted > 0 && tokens > message.tokens) message.rate = (1000 * (tokens - message.tokens)) / predicted;
}

/** Takes a choice of a chunk into the message. */
export function take(message, choice, map) {
  const { delta } = choice;
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
