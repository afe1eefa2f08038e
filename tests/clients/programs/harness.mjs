// What the JavaScript programs here share: the system's addresses, and the record of the features that ran.
import { writeFileSync } from "node:fs";

export const URL = process.env.TANDEM_URL;
export const BASE_URL = `${URL}/v1`;
export const MODEL = process.env.TANDEM_MODEL;
// Seeded and as long as max_tokens allows: the model is random, and its end token may come at any time.
export const TO_THE_LIMIT = { seed: 1, ignore_eos: true };

const results = {};

// Runs the function. Records under `name` how it ended: "" or the error.
export async function feature(name, run) {
  try {
    await run();
    results[name] = "";
  } catch (error) {
    console.error(error);
    results[name] = `${error.name}: ${error.message}`;
  }
  writeFileSync(process.env.TANDEM_RESULTS, JSON.stringify(results));
}
