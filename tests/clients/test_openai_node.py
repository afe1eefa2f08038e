"""The openai package of npm, unmodified. Skipped where node is missing or npm cannot be reached."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or shutil.which("npm") is None, reason="node or npm is not installed"
)

SCRIPT = """
import OpenAI from "openai";
const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Where is my order?" }];
const options = { model, messages, max_tokens: 6, seed: 1, ignore_eos: true };
const chat = await client.chat.completions.create(options);
let text = "", usage = null;
const stream = await client.chat.completions.create({
  ...options, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
const types = [];
let streamed = "";
const asked = { model, input: "Where?", max_output_tokens: 16, stream: true, ignore_eos: true };
const responding = await client.responses.create(asked);
for await (const event of responding) {
  types.push(event.type);
  if (event.type === "response.output_text.delta") streamed += event.delta;
  if (event.type === "response.incomplete") streamed = streamed === event.response.output[0].content[0].text;
}
let status = 0;
try {
  await client.chat.completions.create({ ...options, temperature: 9 });
} catch (error) {
  status = error.status;
}
const models = [];
for await (const found of client.models.list()) models.push(found.id);
console.log(JSON.stringify({ same: text === chat.choices[0].message.content, tokens: usage.completion_tokens,
  first: types[0], last: types.at(-1), streamed, status, models }));
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("node")
    (folder / "ask.mjs").write_text(SCRIPT)
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), "openai@6"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("npm's registry does not answer within a minute")
    if done.returncode:
        pytest.skip("npm cannot install the package")
    return folder


def test_chat_streams_responses_models_and_errors(system, project: Path):
    command = ["node", str(project / "ask.mjs"), system.base_url, system.model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "same": True, "tokens": 6, "first": "response.created", "last": "response.incomplete",
        "streamed": True, "status": 400, "models": [system.model],
    }  # fmt: skip
