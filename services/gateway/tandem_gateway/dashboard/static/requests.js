// The list of requests that ended, and the waterfall of one of them from its receipt.

import { axis, bar, element, head } from "./elements.js";
import { bytes, clock, count, duration, plural } from "./numbers.js";
import { STAGE_COLOURS } from "./panels.js";

const MAX_LISTED = 60;
const COLUMNS = [["ended", null], ["request", null], ["class", "optional"], ["TTFT", "number"], ["E2E", "number"], ["SLO", null]];

const keyOf = (request) => `${request.request_id} ${request.time}`;

export class RequestList {
  constructor() {
    this.table = document.getElementById("requests");
    this.missedOnly = document.getElementById("missed-only");
    this.detail = document.getElementById("request");
    this.note = document.getElementById("request-note");
    this.body = element("tbody");
    this.table.append(head(COLUMNS), this.body);
    /** Null: the newest one that ran. */
    this.chosen = null;
    this.missedOnly.addEventListener("change", () => this.show(this.view));
    const choose = (event) => {
      const row = event.target.closest("tr[data-key]");
      if (!row || (event.type === "keydown" && event.key !== "Enter")) return;
      const isChosen = this.chosen && keyOf(this.chosen) === row.dataset.key;
      this.chosen = isChosen ? null : this.listed.find((request) => keyOf(request) === row.dataset.key);
      this.show(this.view);
    };
    this.body.addEventListener("click", choose);
    this.body.addEventListener("keydown", choose);
  }

  show(view) {
    this.view = view;
    const { samples, index, about } = view;
    this.listed = [];
    for (let at = index; at >= 0 && this.listed.length < MAX_LISTED; at -= 1) {
      this.listed.push(...samples[at].requests.filter((one) => !this.missedOnly.checked || one.cause));
    }
    document.getElementById("requests-note").textContent = `that ended; at most ${about.requests_per_second} per second are kept, missed ones first`;
    const shown = this.chosen ?? this.listed.find((one) => one.decode_pod) ?? null;
    this.#fill(shown);
    this.#showDetail(shown);
  }

  /** Rows that stay are not replaced, so that a click meets the row under the pointer. */
  #fill(shown) {
    const wanted = new Map(this.listed.map((request) => [keyOf(request), request]));
    for (const row of [...this.body.children]) if (!wanted.has(row.dataset.key)) row.remove();
    let next = this.body.firstElementChild;
    for (const [key, request] of wanted) {
      if (next?.dataset.key === key) next = next.nextElementSibling;
      else this.body.insertBefore(row(key, request), next);
    }
    for (const one of this.body.children) one.setAttribute("aria-selected", shown !== null && one.dataset.key === keyOf(shown));
  }

  #showDetail(request) {
    if (!request) {
      this.note.textContent = "";
      this.detail.replaceChildren(element("p", { class: "empty" }, "no request has ended yet"));
      return;
    }
    this.note.textContent = this.chosen ? "chosen; choose it again to follow the newest" : "the newest; choose another one in the list";
    if (keyOf(request) === this.shownKey) return;
    this.shownKey = keyOf(request);
    this.detail.replaceChildren(...(request.decode_pod ? waterfall(request) : []), facts(request));
  }
}

function row(key, request) {
  const result = request.cause ? element("span", { class: "bad" }, request.cause) : met(request);
  const ran = request.decode_pod !== "";
  const contents = [
    clock(request.time), request.request_id, request.slo_class,
    ran ? duration(request.ttft_s) : "–", duration(request.e2e_s), result,
  ];
  const cells = contents.map((content, index) =>
    element("td", { class: COLUMNS[index][0] === "request" ? "id" : COLUMNS[index][1], title: index === 1 ? content : null }, content),
  );
  return element("tr", { "data-key": key, tabindex: 0 }, ...cells);
}

function met(request) {
  return request.is_widened ? "met (wider objectives)" : "met";
}

function waterfall(request) {
  const stages = [
    ["queue", request.queue_s, "queued", ""],
    ["prefill", request.prefill_s, "prefill", request.prefill_pod],
    ["KV transfer", request.transfer_s, "transfer", request.transfer_bytes ? bytes(request.transfer_bytes) : ""],
    ["decode", request.decode_s, "decode", request.decode_pod],
    ...(request.failover_s ? [["failover", request.failover_s, "failover", "on lost pods, and between pods"]] : []),
  ];
  const longest = Math.max(request.e2e_s, request.e2e_p90_s, request.ttft_p90_s, 0.001);
  let begin = 0;
  const lanes = stages.map(([label, seconds, key, where]) => {
    const made = lane(label, [bar("", STAGE_COLOURS[key], begin / longest, (begin + seconds) / longest)], `${duration(seconds)} ${where}`);
    begin += seconds;
    return made;
  });
  for (const [label, time] of [["TTFT", "ttft"], ["E2E", "e2e"]]) {
    const [actual, p50, p90, limit] = ["", "_p50", "_p90", "_objective"].map((end) => request[`${time}${end}_s`]);
    const parts = [];
    if (p90) parts.push(bar("range", "purple", p50 / longest, p90 / longest, "predicted p50 to p90"));
    if (limit && limit <= longest) parts.push(bar("limit", "red", limit / longest, null, "objective"));
    parts.push(bar("mark", "text", Math.min(actual / longest, 0.998), null, "actual"));
    const predicted = p90 ? `, predicted ${duration(p50)} – ${duration(p90)}` : "";
    lanes.push(lane(label, parts, `${duration(actual)}${predicted}`));
  }
  return [...lanes, element("div", { class: "lane waterfall" }, element("span"), axis(longest, duration), element("span"))];
}

function lane(label, parts, text) {
  return element("div", { class: "lane waterfall" }, element("span", {}, label), element("div", { class: "track" }, ...parts), element("span", {}, text));
}

function facts(request) {
  const drafts = Object.keys(request.drafted).sort().map((name) => `${name} ${request.accepted[name] ?? 0} of ${request.drafted[name]}`);
  const objectives = [["TTFT", request.ttft_objective_s], ["TPOT", request.tpot_objective_s], ["E2E", request.e2e_objective_s]]
    .filter(([, limit]) => limit)
    .map(([name, limit]) => `${name} ${duration(limit)}`);
  const moves = [
    request.prefill_retries ? plural(request.prefill_retries, "prefill failover") : "",
    request.decode_retries ? plural(request.decode_retries, "decode failover") : "",
    request.preemptions ? plural(request.preemptions, "preemption") : "",
  ].filter(Boolean);
  const pairs = [
    ["request", request.request_id],
    ["ended", `${clock(request.time)}, ${request.outcome}`],
    ["tenant, class", `${request.tenant}, ${request.slo_class}`],
    ["objectives", objectives.join(", ") || "none"],
    ["SLO", request.cause ? `missed: ${request.cause}${request.miss_reason ? `; ${request.miss_reason}` : ""}` : met(request)],
    ["prompt", `${plural(request.prompt_tokens, "token")}, ${count(request.cached_tokens)} cached`],
    ["output", `${plural(request.output_tokens, "token")} in ${plural(request.decode_steps, "step")}`],
    ["drafts accepted", drafts.join(", ") || "no drafts"],
    ["failovers", moves.join(", ") || "none"],
  ];
  return element("dl", {}, ...pairs.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}
