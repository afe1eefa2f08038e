// Tables and bars of the moment that is viewed.

import { axis, bar, element, fillTable, swatch } from "./elements.js";
import { attainment, before, burn, clock, count, duration, percent, perSecond, rate } from "./numbers.js";

export const CLASS_COLOURS = { standard: "sky", interactive: "blue", chat: "orange", batch: "green" };
export const STAGE_COLOURS = { queued: "grey", prefill: "orange", transfer: "purple", decode: "blue", failover: "red" };
const SOURCE_COLOURS = ["blue", "orange", "green", "purple", "sky", "grey"];
/** A burn of 1 uses the budget of 30 days in 30 days; 14.4 uses 2 % of it in an hour and pages somebody. */
const FAST_BURN = 14.4;

const byId = (id) => document.getElementById(id);

export function sources(sample) {
  return Object.keys(sample.drafted).sort().map((name, index) => ({ name, colour: SOURCE_COLOURS[index % SOURCE_COLOURS.length] }));
}

export function showClasses(view) {
  const { samples, index, about } = view;
  const now = samples[index];
  const [minute, five, thirty] = [60, 300, 1800].map((seconds) => before(samples, index, seconds));
  const objective = about.attainment_objective;
  const rows = Object.keys(now.classes).map((name) => {
    const per = (field) => rate(minute, now, (sample) => sample.classes[name][field]);
    const share = attainment(minute, now, name);
    const burned = (from) => {
      const value = burn(from, now, name, objective);
      return element("span", { class: value >= FAST_BURN ? "bad" : null }, value === null ? "–" : value.toFixed(1));
    };
    return [
      swatch(CLASS_COLOURS[name] ?? "grey", name),
      objectives(about.objectives[name]),
      perSecond(per("received")),
      perSecond(per("output_tokens")),
      perSecond(per("goodput_tokens")),
      element("span", { class: share !== null && share < objective ? "bad" : null }, percent(share)),
      burned(five),
      burned(thirty),
      count(now.classes[name].missed - thirty.classes[name].missed),
    ];
  });
  fillTable(
    byId("classes"),
    [
      ["class", null], ["objectives", "optional"], ["requests/s", "number optional"], ["tokens/s", "number optional"], ["goodput/s", "number"],
      ["attainment", "number"], ["burn 5 min", "number"], ["burn 30 min", "number"], ["missed", "number optional"],
    ],
    rows,
  );
  const causes = Object.entries(now.misses)
    .map(([cause, misses]) => [cause, misses - (thirty.misses[cause] ?? 0)])
    .filter(([, misses]) => misses > 0)
    .sort((a, b) => b[1] - a[1])
    .map(([cause, misses]) => `${cause} ${count(misses)}`);
  const held = now.predictions - minute.predictions;
  const within = held ? percent((now.predictions_held - minute.predictions_held) / held) : "–";
  byId("misses").textContent =
    `Missed in the last 30 minutes, by cause: ${causes.join(", ") || "none"}. TTFT within its predicted p90: ${within} (90 % is aimed at).`;
}

function objectives(slo) {
  const parts = [];
  for (const name of ["ttft", "tpot", "e2e"]) {
    const limit = slo[`${name}_s`], slowdown = slo[`${name}_slowdown`];
    const given = [limit && duration(limit), slowdown && `${slowdown}× as without load`].filter(Boolean);
    if (given.length) parts.push(`${name.toUpperCase()} ${given.join(" or ")}`);
  }
  return parts.join(", ") || "none";
}

export function showStages(view) {
  const { samples, index } = view;
  const now = samples[index];
  const from = before(samples, index, 10);
  const flow = (name) => element("div", { class: "arrow" }, "→", element("br"), `${perSecond(rate(from, now, (sample) => sample[name]))}/s`);
  const stage = (key, label, value, note) =>
    element("div", { class: "stage", key: STAGE_COLOURS[key] }, element("span", {}, label), element("b", {}, count(value)), element("span", {}, note));
  const decodePods = now.pods.filter((pod) => pod.role === "decode" && !pod.trouble);
  const transfers = decodePods.reduce((sum, pod) => sum + pod.transfers, 0);
  const received = (sample) => Object.values(sample.classes).reduce((sum, one) => sum + one.received, 0);
  byId("stages").replaceChildren(
    stage("queued", "queued", now.queued, `${perSecond(rate(from, now, received))}/s arrive`),
    flow("admitted"),
    stage("prefill", "prefill", now.prefill, "no token yet"),
    stage("transfer", "KV transfers", transfers, "open, all gateways"),
    flow("begun"),
    stage("decode", "decode", now.decode, `${perSecond(rate(from, now, (sample) => sample.ended))}/s end`),
  );
}

export function showOpen(view) {
  const now = view.samples[view.index];
  const list = byId("open");
  if (!now.open.length) {
    list.replaceChildren(element("p", { class: "empty" }, "no request is in flight"));
    return;
  }
  const longest = Math.max(1, ...now.open.map((one) => one.age_s));
  const lanes = now.open.slice(0, 12).map((one) => {
    const queued = one.queued_s ?? one.age_s;
    const first = one.ttft_s ?? one.age_s;
    return element(
      "div", { class: "lane" },
      element("span", { class: "id", title: one.request_id }, one.request_id),
      element(
        "div", { class: "track" },
        bar("", STAGE_COLOURS.queued, 0, queued / longest, "queued"),
        bar("", STAGE_COLOURS.prefill, queued / longest, first / longest, "prefill"),
        bar("", STAGE_COLOURS.decode, first / longest, one.age_s / longest, "decode"),
      ),
      element("span", {}, one.output_tokens ? `${count(one.output_tokens)} tok` : duration(one.age_s)),
    );
  });
  const scale = element("div", { class: "lane" }, element("span"), axis(longest, duration), element("span"));
  list.replaceChildren(...lanes, scale);
}

export function showPods(view) {
  const now = view.samples[view.index];
  const rows = now.pods.map((pod) => {
    const blocks = pod.kv_blocks || 1;
    const track = element(
      "div", { class: "track kv", title: `${count(pod.kv_used)} used, ${count(pod.kv_cached)} cached of ${count(pod.kv_blocks)} blocks` },
      bar("", "blue", 0, pod.kv_used / blocks),
      bar("", "sky", pod.kv_used / blocks, (pod.kv_used + pod.kv_cached) / blocks),
    );
    const values = pod.trouble ? ["–", "–", "–"] : [count(pod.waiting), count(pod.running), count(pod.transfers)];
    return [
      pod.pod_id,
      pod.role,
      pod.trouble ? element("span", { class: "bad", title: pod.trouble }, "lost") : "healthy",
      pod.trouble ? "–" : element("span", {}, track, percent(pod.kv_used / blocks)),
      pod.trouble ? "–" : percent(pod.kv_cached / blocks),
      ...values,
      duration(pod.age_s),
    ];
  });
  fillTable(
    byId("pods"),
    [
      ["pod", null], ["role", "optional"], ["state", null], [element("span", {}, swatch("blue", "KV used")), null],
      [element("span", {}, swatch("sky", "cached")), "number optional"], ["waiting", "number"], ["running", "number"],
      ["KV transfers", "number optional"], ["last answer", "number optional"],
    ],
    rows,
    "no pod is listed",
  );
}

export function showDrafts(view) {
  const { samples, index } = view;
  const now = samples[index];
  const from = before(samples, index, 60);
  const rows = sources(now).map(({ name, colour }) => {
    const [drafted, accepted] = ["drafted", "accepted"].map((field) => (now[field][name] ?? 0) - (from[field][name] ?? 0));
    return [swatch(colour, name), count(drafted), count(accepted), drafted ? percent(accepted / drafted) : "–"];
  });
  const steps = now.steps - from.steps;
  const columns = [["source", null], ["drafted", "number"], ["accepted", "number"], ["share", "number"]];
  fillTable(byId("drafts"), columns, rows, "no request with drafts has ended yet");
  const numAccepted = (sample) => Object.values(sample.accepted).reduce((sum, count) => sum + count, 0);
  const accepted = numAccepted(now) - numAccepted(from);
  byId("steps").textContent = steps ? `${(1 + accepted / steps).toFixed(2)} tokens per step` : "";
}

export function showEvents(view, events) {
  const time = view.samples[view.index].time;
  const rows = events.filter((event) => event.time <= time).slice(-50).reverse().map((event) => [clock(event.time), event.what]);
  fillTable(byId("events"), [["time", null], ["what", "wrap"]], rows, "none in the last half hour");
}
