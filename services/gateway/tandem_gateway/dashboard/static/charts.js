// Line charts over time by uPlot, with a legend that shows the values at the pointer, or the last ones.

const { uPlot } = globalThis;
const HEIGHT = 150;
/** One pointer for all charts. */
const pointer = uPlot.sync("time");

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** 2.50 s -> 2.5 s, 75.0 % -> 75 %. */
function withoutZeros(label) {
  return label.replace(/(\.\d*?)0+(?!\d)/, "$1").replace(/\.(?!\d)/, "");
}

export class Chart {
  /**
   * `format(value)` gives text; `scale` goes to uPlot: {range}, {distr: 3} for logarithmic. `limit` is a value
   * with a line of its own.
   */
  constructor(element, { format, scale = {}, splits, limit = null, events = () => [] }) {
    Object.assign(this, { element, format, scale, splits, limit, events });
    this.legend = element.appendChild(document.createElement("div"));
    this.legend.className = "legend";
    this.plotElement = element.appendChild(document.createElement("div"));
    this.plotElement.className = "plot";
    this.shape = null;
    new ResizeObserver(() => this.plot?.setSize(this.#size())).observe(this.plotElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#renew());
  }

  /**
   * `series`: [{label, colour, values, and how it is drawn: dashed, as points, hidden, or `above` the series of
   * this number, as a bar from its value}]. `times`: of all values, which are null where there is none.
   */
  show(times, series, from, to) {
    const shape = series.map((one) => `${one.label}/${one.colour}`).join();
    this.series = series;
    this.data = [times, ...series.map((one) => one.values)];
    this.bounds = { min: from, max: to };
    if (shape !== this.shape) {
      this.shape = shape;
      this.#renew();
    } else {
      this.plot.setData(this.data, false);
      this.plot.setScale("x", this.bounds);
    }
    this.#showLegend();
  }

  #size() {
    return { width: Math.max(this.plotElement.clientWidth, 100), height: HEIGHT };
  }

  #renew() {
    if (!this.data) return;
    this.plot?.destroy();
    const axis = { stroke: colour("quiet"), grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const options = {
      ...this.#size(),
      legend: { show: false },
      padding: [6, 8, 0, 0],
      cursor: { sync: { key: pointer.key }, drag: { x: false, y: false }, points: { size: 5 } },
      scales: { x: { range: () => [this.bounds.min, this.bounds.max] }, y: this.scale },
      axes: [
        { ...axis, space: 60, size: 24, values: "{HH}:{mm}", incrs: [60, 120, 300, 600] },
        { ...axis, space: 28, size: 52, splits: this.splits, values: (plot, ticks) => ticks.map((tick) => (tick === null ? "" : withoutZeros(this.format(tick)))) },
      ],
      series: [
        {},
        ...this.series.map((one) => ({
          label: one.label,
          stroke: colour(one.colour),
          width: 1.5,
          dash: one.dashed ? [5, 4] : undefined,
          points: { show: Boolean(one.points), size: 5, fill: colour(one.colour), stroke: colour(one.colour) },
          paths: one.points || one.hidden || one.above !== undefined ? () => null : undefined,
        })),
      ],
      hooks: { drawAxes: [(plot) => this.#drawBars(plot)], draw: [(plot) => this.#drawLines(plot)], setCursor: [() => this.#showLegend()] },
    };
    this.plot = new uPlot(options, this.data, this.plotElement);
    this.plot.setScale("x", this.bounds);
  }

  #drawBars(plot) {
    const { ctx, bbox } = plot;
    const [times, ...values] = this.data;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    for (const [number, one] of this.series.entries()) {
      if (one.above === undefined) continue;
      ctx.strokeStyle = colour(one.colour);
      ctx.lineWidth = 2 * devicePixelRatio;
      ctx.globalAlpha = 0.5;
      ctx.beginPath();
      for (const [index, high] of values[number].entries()) {
        if (high === null) continue;
        const x = Math.round(plot.valToPos(times[index], "x", true));
        ctx.moveTo(x, plot.valToPos(values[one.above][index], "y", true));
        ctx.lineTo(x, plot.valToPos(high, "y", true));
      }
      ctx.stroke();
    }
    ctx.restore();
  }

  /** Failovers as vertical lines, and the limit. */
  #drawLines(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = colour("red");
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    for (const event of this.events()) {
      if (event.time < this.bounds.min || event.time > this.bounds.max) continue;
      const x = Math.round(plot.valToPos(event.time, "x", true));
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
    }
    if (this.limit !== null) {
      const y = Math.round(plot.valToPos(this.limit, "y", true));
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
    }
    ctx.stroke();
    ctx.restore();
  }

  #showLegend() {
    const at = this.plot?.cursor.idx ?? null;
    this.legend.replaceChildren(
      ...this.series.map((one) => {
        const entry = document.createElement("span");
        const key = entry.appendChild(document.createElement("span"));
        key.className = one.dashed ? "key dashed" : "key";
        key.style.setProperty("--key", `var(--${one.colour})`);
        // Of what is not measured each second the last known one.
        const isSparse = one.points || one.hidden || one.above !== undefined;
        const last = isSparse ? one.values.findLast((known) => known !== null) : one.values.at(-1);
        const value = at === null ? last : one.values[at];
        entry.append(`${one.label} ${this.format(value ?? null)}`);
        return entry;
      }),
    );
  }
}
