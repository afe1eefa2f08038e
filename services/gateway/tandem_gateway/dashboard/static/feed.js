// Reads the gateway's samples: all that it has, then each second those that are new.

import { events, unpacked } from "./numbers.js";

const INTERVAL_MS = 1000;
const LONGEST_RETRY_MS = 5000;
const TIMEOUT_MS = 5000;
/** As many as a gateway keeps. */
const MAX_SAMPLES = 1800;
const KEY = "tandem-operator-key";

export class Feed {
  /** `changed()` is called after each answer and each failure. */
  constructor(changed) {
    this.changed = changed;
    this.about = null;
    this.samples = [];
    this.events = [];
    /** Why no samples come; "": they do. */
    this.trouble = "connecting";
    /** The gateway's answer to a missing or wrong key; "": none. */
    this.refusal = "";
    this.next = 0;
    this.failures = 0;
    /** Of the gateway that answered last, and how many answers in a row came from another one than before. */
    this.start = null;
    this.changes = 0;
  }

  async run() {
    for (;;) {
      const isBehind = await this.#ask();
      this.changed();
      if (!isBehind) await this.#pause(this.failures ? Math.min(INTERVAL_MS * this.failures, LONGEST_RETRY_MS) : INTERVAL_MS);
    }
  }

  useKey(key) {
    sessionStorage.setItem(KEY, key);
    this.wake?.();
  }

  #pause(milliseconds) {
    return new Promise((resolve) => {
      this.wake = resolve;
      setTimeout(resolve, milliseconds);
    });
  }

  /** Whether there are more samples at once. */
  async #ask() {
    const key = sessionStorage.getItem(KEY);
    try {
      const response = await fetch(`data?since=${this.next}`, {
        headers: key ? { authorization: `Bearer ${key}` } : {},
        signal: AbortSignal.timeout(TIMEOUT_MS),
      });
      const body = await response.json();
      if (response.status === 401 || response.status === 403) {
        this.refusal = key || response.status === 403 ? body.error.message : "This gateway asks for a key.";
        this.failures = 0;
        return false;
      }
      if (!response.ok) throw new Error(body.error?.message ?? `status ${response.status}`);
      this.refusal = this.trouble = "";
      this.failures = 0;
      if (this.#isAnother(body.about.start)) {
        this.#forget();
        if (this.changes > 1) throw new Error("several gateways answer at this address");
        return false;
      }
      this.about = body.about;
      this.next = body.next;
      body.samples.forEach((sample) => this.#add(sample));
      return body.next <= body.newest;
    } catch (error) {
      this.failures += 1;
      this.trouble = error instanceof TypeError || error.name === "TimeoutError" ? "the gateway does not answer" : error.message;
      return false;
    }
  }

  /** Whether another gateway answers than before: it was started anew, or the address is that of several. */
  #isAnother(start) {
    const isAnother = this.start !== null && this.start !== start;
    this.start = start;
    this.changes = isAnother ? this.changes + 1 : 0;
    return isAnother;
  }

  #add(packed) {
    const sample = unpacked(packed, this.about.columns);
    const last = this.samples.at(-1);
    if (last) this.events.push(...events(last, sample));
    this.samples.push(sample);
    if (this.samples.length > MAX_SAMPLES) this.samples.shift();
    while (this.events.length && this.events[0].time < this.samples[0].time) this.events.shift();
  }

  /** The counts of another gateway are others. */
  #forget() {
    this.about = null;
    this.samples = [];
    this.events = [];
    this.next = 0;
  }
}
