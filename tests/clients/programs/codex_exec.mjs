// The Codex CLI, without its terminal.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdirSync, writeFileSync } from "node:fs";
import path from "node:path";
import { BASE_URL, MODEL, feature } from "./harness.mjs";

const home = path.join(process.cwd(), "codex");
const folder = path.join(process.cwd(), "work");
mkdirSync(home);
mkdirSync(folder);
const config = `
# snippet toml
model = "$MODEL"
model_provider = "tandem"
[model_providers.tandem]
name = "Tandem"
base_url = "$BASE_URL"
wire_api = "responses"
# end
`;
writeFileSync(path.join(home, "config.toml"), config.replace("$MODEL", MODEL).replace("$BASE_URL", BASE_URL));

const codex = path.join(import.meta.dirname, "node_modules", ".bin", "codex");

// The events of a turn: with `resume` of the last session, whose items Codex sends again.
function turn(prompt, ...resume) {
  const flags = ["--json", "--skip-git-repo-check"];
  const output = execFileSync(codex, ["exec", ...resume, ...flags, prompt], {
    cwd: folder, env: { PATH: process.env.PATH, HOME: home, CODEX_HOME: home, NO_PROXY: "127.0.0.1" },
    stdio: ["ignore", "pipe", "inherit"] });
  return output.toString().trim().split("\n").map((line) => JSON.parse(line));
}

function check(events) {
  const last = events.at(-1);
  assert.equal(last.type, "turn.completed", JSON.stringify(events));
  assert.ok(last.usage.output_tokens > 0);
}

await feature("responses", () => check(turn("Say hello.")));
await feature("resume", () => check(turn("And again.", "resume", "--last")));
