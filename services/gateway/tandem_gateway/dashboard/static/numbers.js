// What samples mean: pure functions without the page. Times are Unix seconds, counts are since the gateway's start.

/** Arrays with the names of their columns -> objects. */
export function named(columns, row) {
  return Object.fromEntries(columns.map((name, index) => [name, row[index]]));
}

/** A sample as the gateway sends it -> the same with objects in place of rows. */
export function unpacked(sample, columns) {
  return {
    ...sample,
    classes: Object.fromEntries(Object.entries(sample.classes).map(([name, row]) => [name, named(columns.classes, row)])),
    pods: sample.pods.map((row) => named(columns.pods, row)),
    open: sample.open.map((row) => named(columns.open, row)),
    requests: sample.requests.map((row) => ({ ...named(columns.requests, row), time: sample.time })),
    ttft: sample.ttft && named(columns.ttft, sample.ttft),
  };
}

/** Index of the last sample at or before `time`; 0 if all are later. */
export function indexAt(samples, time) {
  let low = 0;
  let high = samples.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (samples[middle].time <= time) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** The sample `seconds` before samples[index], or the oldest one. */
export function before(samples, index, seconds) {
  return samples[indexAt(samples, samples[index].time - seconds + 0.5)];
}

/** Increase per second of `count(sample)`; 0 between a sample and itself. */
export function rate(from, to, count) {
  const seconds = to.time - from.time;
  return seconds > 0 ? (count(to) - count(from)) / seconds : 0;
}

/** Share of the requests of a class that met their SLO, of those that ended in between; null: none ended. */
export function attainment(from, to, slo_class) {
  const [a, b] = [from.classes[slo_class], to.classes[slo_class]];
  const met = b.met - a.met;
  const ended = met + b.missed - a.missed;
  return ended ? met / ended : null;
}

/** How many times faster than allowed the error budget is used; null: no request ended. */
export function burn(from, to, slo_class, objective) {
  const share = attainment(from, to, slo_class);
  return share === null ? null : (1 - share) / (1 - objective);
}

/** What happened to pods and requests between two consecutive samples. */
export function events(from, to) {
  const found = [];
  for (const [cause, count] of Object.entries(to.failovers)) {
    const moved = count - (from.failovers[cause] ?? 0);
    if (moved > 0) found.push({ time: to.time, what: `${plural(moved, "request")} moved to another decode pod (${cause})` });
  }
  const retries = to.prefill_retries - from.prefill_retries;
  if (retries > 0) found.push({ time: to.time, what: `${plural(retries, "prompt")} moved to another prefill pod` });
  const earlier = new Map(from.pods.map((pod) => [pod.target, pod]));
  for (const pod of to.pods) {
    const previous = earlier.get(pod.target);
    earlier.delete(pod.target);
    if (!previous) found.push({ time: to.time, what: `${pod.pod_id} is listed` });
    else if (!previous.trouble && pod.trouble) found.push({ time: to.time, what: `${pod.pod_id} lost: ${pod.trouble}` });
    else if (previous.trouble && !pod.trouble) found.push({ time: to.time, what: `${pod.pod_id} is healthy` });
  }
  for (const pod of earlier.values()) found.push({ time: to.time, what: `${pod.pod_id} is no longer listed` });
  return found;
}

// -- as text --------------------------------------------------------------------------------------------------

export function plural(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.9995) return `${(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  return seconds < 99.5 ? `${seconds.toFixed(2)} s` : `${seconds.toFixed(0)} s`;
}

export function count(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en");
}

/** Per second: one decimal where it matters. */
export function perSecond(value) {
  if (value === null || value === undefined) return "–";
  return value < 9.95 ? value.toFixed(1) : count(value);
}

export function percent(share) {
  if (share === null || share === undefined) return "–";
  return `${(100 * share).toFixed(share > 0.995 && share < 1 ? 2 : share === 1 ? 0 : 1)} %`;
}

export function bytes(value) {
  return value >= 1e6 ? `${(value / 1e6).toFixed(1)} MB` : `${(value / 1e3).toFixed(0)} kB`;
}

export function clock(time) {
  return new Date(time * 1000).toLocaleTimeString("en-GB");
}
