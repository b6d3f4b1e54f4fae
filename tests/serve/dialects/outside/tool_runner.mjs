// Anthropic's loops that call tools, in JavaScript: node tool_runner.mjs URL MODEL PROMPT FOLDER [FIELDS]. Prints what came
// of each, as JSON. FOLDER has the packages; FIELDS go into each request.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, model, prompt, folder, fields = "{}"] = process.argv.slice(2);
const from = createRequire(pathToFileURL(`${folder}/package.json`));
const { Anthropic } = from("@anthropic-ai/sdk");
const { betaZodTool } = from("@anthropic-ai/sdk/helpers/beta/zod");
const { betaTool } = from("@anthropic-ai/sdk/helpers/beta/json-schema");
const { z } = from("zod");

const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const f = betaZodTool({
  name: "f",
  description: "does it",
  inputSchema: z.object({ a: z.string() }),
  run: ({ a }) => `done with ${a}`,
});
const typed = betaTool({
  name: "f",
  description: "does it",
  inputSchema: { type: "object", properties: { a: { type: "string" } }, required: ["a"] },
  run: ({ a }) => `done with ${a}`,
});
const messages = [{ role: "user", content: prompt }];
const base = { model, max_tokens: 400, messages, temperature: 0, max_iterations: 3, ...JSON.parse(fields) };

const text = (message) => message.content.filter((b) => b.type === "text").map((b) => b.text).join("");

async function whole(tools, more = {}) {
  const runner = client.beta.messages.toolRunner({ ...base, tools, ...more });
  const reasons = [];
  for await (const message of runner) reasons.push(message.stop_reason);
  return { reasons, text: text(await runner.done()) };
}

async function streamed(more = {}) {
  const runner = client.beta.messages.toolRunner({ ...base, tools: [f], stream: true, ...more });
  const pieces = [];
  const reasons = [];
  for await (const stream of runner) {
    let said = "";
    for await (const event of stream) {
      if (event.type === "content_block_delta" && event.delta.type === "text_delta") said += event.delta.text;
    }
    pieces.push(said);
    reasons.push((await stream.finalMessage()).stop_reason);
  }
  return { reasons, text: pieces.at(-1) };
}

const found = {};
for (const [name, run] of Object.entries({
  zod: () => whole([f]),
  json: () => whole([typed]),
  stream: () => streamed(),
  eager: () => streamed({ runToolsEagerly: true }),
  unthreaded: () => whole([f], { thread: false }),
})) {
  try {
    found[name] = await run();
  } catch (error) {
    found[name] = { error: String(error) };
  }
}
console.log(JSON.stringify(found));
