// The page: reads the samples, and shows the moment that is viewed with the time before it.

import { Chart } from "./charts.js";
import { Feed } from "./feed.js";
import { attainment, clock, duration, indexAt, percent, perSecond, rate } from "./numbers.js";
import { CLASS_COLOURS, STAGE_COLOURS, showClasses, showDrafts, showEvents, showOpen, showPods, showStages, sources } from "./panels.js";
import { RequestList } from "./requests.js";

const byId = (id) => document.getElementById(id);
/** More lines than colours cannot be told apart; the table of pods has them all. */
const POD_COLOURS = ["blue", "orange", "green", "purple", "sky", "red", "grey"];
/** Without a new sample for so long, the numbers are called old. */
const STALE_S = 4;

const feed = new Feed(show);
/** Unix time that is viewed; null: the newest sample. */
let viewed = null;

const events = () => feed.events.filter((event) => event.what.includes(" moved ") || event.what.includes(" lost: "));
const positive = { range: (plot, low, high) => [0, Math.max(high ?? 0, 1) * 1.05] };
const charts = {
  goodput: new Chart(byId("goodput"), { format: perSecond, scale: positive, events }),
  attainment: new Chart(byId("attainment"), { format: percent, scale: { range: upperPart }, limit: 0.99, events }),
  ttft: new Chart(byId("ttft"), { format: duration, scale: { distr: 3, range: decades }, splits: onesTwosFives, events }),
  stages: new Chart(byId("stage-chart"), { format: whole, scale: positive, events }),
  kv: new Chart(byId("kv-chart"), { format: percent, scale: { range: (plot, low, high) => [0, Math.min(Math.max(high ?? 0, 0.05) * 1.1, 1.02)] }, events }),
  drafts: new Chart(byId("drafts-chart"), { format: perSecond, scale: positive, events }),
};
const requests = new RequestList();

/** Ticks of a logarithmic scale. */
function onesTwosFives(plot, axis, low, high) {
  const ticks = [];
  for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10) ticks.push(power, 2 * power, 5 * power);
  return ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
}

/** Where the lowest attainment leaves room, the upper part alone. */
function upperPart(plot, low) {
  const floor = [0.9, 0.5].find((share) => (low ?? 1) >= share) ?? 0;
  return [floor, 1 + (1 - floor) * 0.03];
}

/** Whole powers of ten around the values. */
function decades(plot, low, high) {
  if (low === null || low === undefined || low <= 0) return [0.01, 10];
  return [10 ** Math.floor(Math.log10(low)), 10 ** Math.ceil(Math.log10(high * 1.001))];
}

function whole(value) {
  return value === null ? "–" : Number.isInteger(value) ? String(value) : "";
}

function show() {
  byId("key-form").hidden = !feed.refusal;
  byId("key-message").textContent = feed.refusal;
  byId("panels").hidden = Boolean(feed.refusal) || !feed.samples.length;
  showStatus();
  if (feed.refusal || !feed.samples.length) return;
  const samples = feed.samples;
  const newest = samples.at(-1).time;
  if (viewed !== null && viewed < samples[0].time) viewed = samples[0].time;
  const index = viewed === null ? samples.length - 1 : indexAt(samples, viewed);
  const view = { samples, index, about: feed.about };
  byId("about").textContent = `gateway ${feed.about.gateway} · ${feed.about.model}`;
  document.title = `Tandem · ${feed.about.gateway}`;
  byId("live").disabled = viewed === null;
  byId("rewind-slider").min = -Math.max(60, Math.round(newest - samples[0].time));
  byId("rewind-slider").value = viewed === null ? 0 : Math.round(viewed - newest);
  byId("rewind-label").textContent = viewed === null ? "live" : `at ${clock(samples[index].time)}`;
  showClasses(view);
  showStages(view);
  showOpen(view);
  showPods(view);
  showDrafts(view);
  showEvents(view, feed.events);
  requests.show(view);
  showCharts(view);
}

function showStatus() {
  const last = feed.samples.at(-1);
  const age = last ? Date.now() / 1000 - last.time : 0;
  const isLost = Boolean(feed.trouble) && feed.failures > 0;
  document.body.classList.toggle("stale", isLost || age > STALE_S);
  byId("status").classList.toggle("lost", isLost);
  let text = feed.trouble ? `${feed.trouble}…` : "";
  if (isLost) text = `${feed.trouble}; trying again${last ? `. Last sample: ${clock(last.time)}` : ""}`;
  else if (last && !feed.trouble) text = age > STALE_S ? `the newest sample is of ${clock(last.time)}` : clock(last.time);
  byId("status").textContent = text;
}

function showCharts({ samples, index }) {
  const to = samples[index].time;
  const from = to - Number(byId("span").value);
  const first = indexAt(samples, from);
  const shown = samples.slice(first, index + 1);
  const times = shown.map((sample) => sample.time);
  /** value(earlier, now) of each sample with the one `seconds` before it. */
  const over = (seconds, value) => {
    let earlier = indexAt(samples, times[0] - seconds);
    return shown.map((sample) => {
      while (samples[earlier + 1].time <= sample.time - seconds + 0.5 && samples[earlier + 1] !== sample) earlier += 1;
      return value(samples[earlier], sample);
    });
  };
  if (samples.length < 2) return;
  const classes = Object.keys(samples[index].classes);
  const ofClasses = (value, seconds) =>
    classes.map((name) => ({ label: name, colour: CLASS_COLOURS[name] ?? "grey", values: over(seconds, (earlier, now) => value(earlier, now, name)) }));
  charts.goodput.show(times, ofClasses((earlier, now, name) => rate(earlier, now, (sample) => sample.classes[name].goodput_tokens), 10), from, to);
  charts.attainment.show(times, ofClasses(attainment, 60), from, to);
  const ttft = (field) => shown.map((sample) => sample.ttft?.[field] ?? null);
  charts.ttft.show(
    times,
    [
      { label: "actual", colour: "blue", points: true, values: ttft("actual_s") },
      { label: "predicted p50", colour: "orange", hidden: true, values: ttft("p50_s") },
      { label: "to p90", colour: "orange", above: 1, values: ttft("p90_s") },
    ],
    from,
    to,
  );
  const stages = ["queued", "prefill", "decode"].map((name) => ({ label: name, colour: STAGE_COLOURS[name], values: shown.map((sample) => sample[name]) }));
  charts.stages.show(times, stages, from, to);
  const pods = samples[index].pods.slice(0, POD_COLOURS.length).map((pod, place) => ({
    label: pod.pod_id,
    colour: POD_COLOURS[place],
    dashed: pod.role === "prefill",
    values: shown.map((sample) => {
      const then = sample.pods.find((other) => other.target === pod.target);
      return !then || then.trouble || !then.kv_blocks ? null : then.kv_used / then.kv_blocks;
    }),
  }));
  charts.kv.show(times, pods, from, to);
  byId("kv-note").textContent = `of ${samples[index].pods.length > pods.length ? `the first ${pods.length} pods` : "each pod"}, without prefix caches`;
  const drafts = sources(samples[index]).map(({ name, colour }) => ({
    label: name,
    colour,
    values: over(10, (earlier, now) => rate(earlier, now, (sample) => sample.accepted[name] ?? 0)),
  }));
  charts.drafts.show(times, drafts, from, to);
}

byId("rewind-slider").addEventListener("input", (event) => {
  const offset = Number(event.target.value);
  viewed = offset === 0 ? null : feed.samples.at(-1).time + offset;
  requests.chosen = null;
  show();
});
byId("live").addEventListener("click", () => {
  viewed = null;
  show();
});
byId("span").addEventListener("change", show);
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  feed.useKey(byId("key").value.trim());
  byId("key").value = "";
});

feed.run();
