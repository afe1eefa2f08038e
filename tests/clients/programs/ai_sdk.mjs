// The Vercel AI SDK with its three providers that speak the gateway's dialects.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { Output, generateObject, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { BASE_URL, MODEL, feature } from "./harness.mjs";
// snippet
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText } from "ai";

const tandem = createOpenAICompatible({
  name: "tandem",
  baseURL: BASE_URL,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const { text } = await generateText({ model: tandem(MODEL), prompt: "What is 2+2?", maxOutputTokens: 100 });
console.log(text);
// end

const openai = createOpenAI({ baseURL: BASE_URL, apiKey: "none" });
const openAI = [tandem(MODEL), openai.chat(MODEL)];
const responses = [openai.responses(MODEL)];
const messages = [createAnthropic({ baseURL: BASE_URL, apiKey: "none" })(MODEL)];
const schema = z.object({ kind: z.enum(["broken", "late"]), urgent: z.boolean() });
const prompt = "Where is my order?";
const reports = [];
const tools = {
  report: tool({ description: "Files a report.", inputSchema: schema, execute: async (report) => {
    reports.push(report);
    return "filed";
  } }),
};
// Each provider reads its own.
const oneCall = { tandem: { parallel_tool_calls: false }, openai: { parallelToolCalls: false },
  anthropic: { disableParallelToolUse: true } };
const fail = (error) => { throw error; };

async function chats(model) {
  const whole = await generateText({ model, prompt, maxOutputTokens: 16 });
  assert.ok(whole.usage.outputTokens > 0);
}

async function streams(model) {
  const stream = streamText({ model, prompt, maxOutputTokens: 16, onError: ({ error }) => fail(error) });
  let streamed = "";
  for await (const delta of stream.textStream) streamed += delta;
  assert.equal(streamed, await stream.text);
  assert.ok((await stream.usage).outputTokens > 0);
}

async function callsTools(model) {
  const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });
  const options = { model, prompt, tools, maxOutputTokens: 400, stopWhen: stepCountIs(2), prepareStep,
    providerOptions: oneCall };
  reports.length = 0;
  const { steps } = await generateText(options);
  assert.equal(steps.length, 2);
  const whole = reports.length;
  await streamText(options).consumeStream({ onError: fail });
  assert.ok(whole >= 1 && reports.length > whole);
  reports.forEach((report) => schema.parse(report));
}

async function keepsTheSchema(model) {
  const options = { model, prompt, maxOutputTokens: 200 };
  schema.parse((await generateObject({ ...options, schema })).object);
  schema.parse((await generateText({ ...options, output: Output.object({ schema }) })).output);
  let last = null;
  for await (const partial of streamObject({ ...options, schema }).partialObjectStream) last = partial;
  schema.parse(last);
}

async function each(models, ...checks) {
  for (const model of models) for (const check of checks) await check(model);
}

await feature("chat", () => each(openAI, chats));
await feature("stream", () => each(openAI, streams));
await feature("tools", () => each(openAI, callsTools));
await feature("schema", () => each(openAI, keepsTheSchema));
await feature("responses", () => each(responses, chats, streams, callsTools, keepsTheSchema));
await feature("messages", () => each(messages, chats, streams, callsTools, keepsTheSchema));
