// node vercel.mjs URL MODEL CLIENTS: chats by Vercel's `ai`, whole, streamed and of a schema. Prints what came.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, model, clients] = process.argv.slice(2);
const require = createRequire(pathToFileURL(`${clients}/package.json`));
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { generateText, streamText, Output, jsonSchema } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");

const provider = createOpenAICompatible({
  name: "kvasir",
  baseURL: `${url}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const asked = { model: provider(model), prompt: "What is 23 + 45?", temperature: 0, maxOutputTokens: 60, maxRetries: 0 };
const whole = await generateText(asked);
const stream = streamText(asked);
let streamed = "";
for await (const piece of stream.textStream) streamed += piece;
const number = { type: "integer" };
const schema = jsonSchema({
  type: "object",
  properties: { left: number, right: number },
  required: ["left", "right"],
  additionalProperties: false,
});
const typed = await generateText({ ...asked, output: Output.object({ schema }) });
console.log(
  JSON.stringify({
    whole: whole.text,
    streamed,
    tokens: [whole.usage.outputTokens, (await stream.usage).outputTokens],
    reason: whole.finishReason,
    typed: typed.output,
  }),
);
