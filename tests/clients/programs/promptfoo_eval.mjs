// `promptfoo eval`, with its providers for OpenAI's and Anthropic's APIs.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import path from "node:path";
import { BASE_URL, MODEL, URL, feature } from "./harness.mjs";
// snippet
const provider = (id, options) => ({ id, config: { apiKey: "none", max_tokens: 16, ...options } });
const config = {
  prompts: ["Where is my {{thing}}?"],
  tests: [{ vars: { thing: "order" } }, { vars: { thing: "parcel" } }],
  providers: [provider(`openai:chat:${MODEL}`, { apiBaseUrl: BASE_URL })],
};
// end

const promptfoo = path.join(import.meta.dirname, "node_modules", ".bin", "promptfoo");
const env = { ...process.env, PROMPTFOO_CONFIG_DIR: process.cwd(), PROMPTFOO_DISABLE_TELEMETRY: "1",
  PROMPTFOO_DISABLE_UPDATE: "1", PROMPTFOO_CACHE_ENABLED: "false" };

function evaluate(one) {
  writeFileSync("promptfooconfig.json", JSON.stringify({ ...config, providers: [one] }));
  execFileSync(promptfoo, ["eval", "-c", "promptfooconfig.json", "-o", "report.json", "--no-table"], { env, stdio: "inherit" });
  const { stats } = JSON.parse(readFileSync("report.json")).results;
  assert.deepEqual([stats.successes, stats.failures, stats.errors], [2, 0, 0]);
}

await feature("chat", () => evaluate(config.providers[0]));
await feature("completions", () => evaluate(provider(`openai:completion:${MODEL}`, { apiBaseUrl: BASE_URL })));
await feature("responses", () =>
  evaluate(provider(`openai:responses:${MODEL}`, { apiBaseUrl: BASE_URL, max_output_tokens: 16 })));
await feature("messages", () => evaluate(provider(`anthropic:messages:${MODEL}`, { apiBaseUrl: URL })));
