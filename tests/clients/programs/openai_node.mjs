// The openai package of npm.
import assert from "node:assert/strict";
import { BASE_URL, MODEL, TO_THE_LIMIT, feature } from "./harness.mjs";
// snippet
import OpenAI from "openai";

const client = new OpenAI({ baseURL: BASE_URL, apiKey: "none" });
const chat = await client.chat.completions.create({
  model: MODEL,
  messages: [{ role: "user", content: "What is 2+2?" }],
});
console.log(chat.choices[0].message.content);
// end

const messages = [{ role: "user", content: "Where is my order?" }];
const asked = { model: MODEL, messages, max_tokens: 6, ...TO_THE_LIMIT };
const tools = [{ type: "function", function: { name: "report", parameters: {
  type: "object", properties: { urgent: { type: "boolean" } }, required: ["urgent"], additionalProperties: false } } }];

await feature("models", async () => {
  const models = [];
  for await (const found of client.models.list()) models.push(found.id);
  assert.deepEqual(models, [MODEL]);
});

await feature("chat", async () => {
  const whole = await client.chat.completions.create(asked);
  assert.equal(whole.usage.completion_tokens, 6);
  assert.equal(whole.choices[0].finish_reason, "length");
});

await feature("stream", async () => {
  const whole = await client.chat.completions.create(asked);
  let text = "", usage = null;
  const stream = await client.chat.completions.create({
    ...asked, stream: true, stream_options: { include_usage: true } });
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(usage.completion_tokens, 6);
});

await feature("tools", async () => {
  const options = { ...asked, max_tokens: 150, ignore_eos: false, tools, tool_choice: "required",
    parallel_tool_calls: false };
  const whole = await client.chat.completions.create(options);
  const [call] = whole.choices[0].message.tool_calls;
  const final = await client.chat.completions.stream(options).finalChatCompletion();
  const [streamed] = final.choices[0].message.tool_calls;
  assert.equal(call.function.name, "report");
  assert.deepEqual(JSON.parse(streamed.function.arguments), JSON.parse(call.function.arguments));
});

await feature("responses", async () => {
  const options = { model: MODEL, input: "Where?", max_output_tokens: 16, ...TO_THE_LIMIT };
  const whole = await client.responses.create(options);
  let text = "", last = null;
  for await (const event of await client.responses.create({ ...options, stream: true })) {
    if (event.type === "response.output_text.delta") text += event.delta;
    last = event;
  }
  assert.equal(last.type, "response.incomplete");
  assert.equal(text, last.response.output[0].content[0].text);
  assert.equal(text, whole.output_text);
});

await feature("completions", async () => {
  const done = await client.completions.create({ model: MODEL, prompt: "Once", max_tokens: 4, ...TO_THE_LIMIT });
  assert.equal(done.usage.completion_tokens, 4);
});

await feature("errors", async () => {
  await assert.rejects(client.chat.completions.create({ ...asked, temperature: 9 }), OpenAI.BadRequestError);
});
