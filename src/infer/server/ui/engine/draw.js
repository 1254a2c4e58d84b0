/** Drawing an engine's history on a canvas: lanes of seats and of the queue, and charts, all on one
 * time axis. A canvas and not SVG: ten minutes have tens of thousands of parts. */

/** @typedef {import("./history.js").History} History */
/** @typedef {{from: number, to: number, until: number, cursor: number | null, zero?: number}} Window
 * the time that is shown; nothing after `until` is drawn; `cursor` is the time that is pointed at; the axis counts from
 * `zero` */

const QUEUE_ROWS = 8;
/** Height of the line above the lanes of a replica, which has its name. */
const HEAD = 18;
export const LABEL = 74;

const NAMES = ["quiet", "line", "waiting", "preempted", "cached", "prompt", "decode", "accent"];
// As colours, their values are those of the scheme that is in use; otherwise they would be text.
for (const each of NAMES) {
  try {
    CSS.registerProperty({ name: `--engine-${each}`, syntax: "<color>", inherits: true, initialValue: "gray" });
  } catch {
    // It is registered already.
  }
}

/** Colours of the page, read where it is drawn. @param {Element} element */
export function colours(element) {
  const style = getComputedStyle(element);
  /** @param {string} name */
  const of = (name) => style.getPropertyValue(`--engine-${name}`).trim();
  const light = (style.color.match(/[\d.]+/g) ?? ["0"]).slice(0, 3).reduce((sum, part) => sum + Number(part), 0);
  return {
    text: style.color,
    quiet: of("quiet"),
    line: of("line"),
    waiting: of("waiting"),
    preempted: of("preempted"),
    cached: of("cached"),
    prompt: of("prompt"),
    decode: of("decode"),
    accent: of("accent"),
    font: style.fontFamily,
    isDark: light > 384,
  };
}

/** @typedef {ReturnType<typeof colours>} Colours */

/** Hue of a request: neighbours differ. @param {number} number @param {Colours} c @param {number} [light] */
export function hue(number, c, light = 0) {
  const degrees = (number * 137.5) % 360;
  return `hsl(${degrees} ${c.isDark ? 45 : 55}% ${(c.isDark ? 48 : 62) + light}%)`;
}

/** Prepare a canvas for its size on the screen. @param {HTMLCanvasElement} canvas @param {number} height */
export function fit(canvas, height) {
  const width = canvas.clientWidth;
  const scale = window.devicePixelRatio || 1;
  const wide = Math.round(width * scale);
  const high = Math.round(height * scale);
  if (canvas.width !== wide) canvas.width = wide;
  if (canvas.height !== high) canvas.height = high;
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width };
}

/** Whether a part of an element is in the window. @param {Element} element */
export function isInSight(element) {
  const { top, bottom } = element.getBoundingClientRect();
  return bottom > 0 && top < innerHeight;
}

/** @typedef {{name: string, seats: number, top: number}} Group lanes of one replica; `top` is that of its first seat */
/** @typedef {{groups: Group[], queue: number, high: number, top: number, height: number}} Layout
 * `high` is the height of a lane, `top` that of everything below the queue */

/** Lanes that are drawn, and their height. @param {History} history @param {number} [most] @returns {Layout} */
export function lanes(history, most = 0) {
  const groups = [...history.replicas].map(([name, { maxLane }]) => (
    { name, seats: Math.max(1, most || Math.min(history.hello.seats, maxLane + 1)), top: 0 }));
  const seats = groups.reduce((sum, each) => sum + each.seats, 0);
  const queue = Math.min(QUEUE_ROWS, history.queueRows);
  const high = seats <= 16 ? 20 : seats <= 48 ? 11 : 5;
  const top = queue ? queue * high + 10 : 0;
  let height = top;
  for (const group of groups) {
    group.top = height + (history.hasReplicas ? HEAD : 0);
    height = group.top + group.seats * high;
  }
  return { groups, queue, high, top, height: height + 18 };
}

/** The lane at a height, and its replica; the last lane above it where there is none. @param {Layout} layout @param {number} y */
export function laneAt(layout, y) {
  if (y < layout.top) return { replica: layout.groups[0].name, lane: Math.floor(y / layout.high) - layout.queue };
  const group = layout.groups.findLast((each) => y >= each.top - HEAD) ?? layout.groups[0];
  return { replica: group.name, lane: Math.floor((y - group.top) / layout.high) };
}

/** @param {CanvasRenderingContext2D} context @param {Window} view @param {number} width */
function xOf(context, view, width) {
  const scale = (width - LABEL) / (view.to - view.from);
  return (/** @type {number} */ time) => LABEL + (time - view.from) * scale;
}

/** The lanes. @param {HTMLCanvasElement} canvas @param {History} history @param {Window} view
 * @param {Colours} c @param {{seats: string, queue: string, selected: number | null, most?: number}} words */
export function drawLanes(canvas, history, view, c, words) {
  const layout = lanes(history, words.most);
  const { context, width } = fit(canvas, layout.height);
  const x = xOf(context, view, width);
  const { high, top } = layout;
  const tops = new Map(layout.groups.map((each) => [each.name, each.top]));
  /** @param {import("./history.js").Span} span */
  const y = ({ lane, replica }) => (lane >= 0 ? (tops.get(replica) ?? Number.NaN) + lane * high : (layout.queue + lane) * high);
  context.font = `11px ${c.font}`;
  context.textBaseline = "middle";
  for (const group of layout.groups) {
    context.fillStyle = c.line;
    for (let lane = 0; lane < group.seats; lane++) context.fillRect(LABEL, group.top + (lane + 1) * high - 1, width - LABEL, 0.5);
    if (!history.hasReplicas) continue;
    context.fillRect(0, group.top - HEAD, width, 0.5);
    drawAbsences(context, history.replica(group.name), view, c, x, width, group.top - HEAD + 1, group.seats * high + HEAD - 2);
    context.fillStyle = c.text;
    context.fillText(group.name, 2, group.top - HEAD / 2 + 1);
  }
  context.save();
  context.beginPath();
  context.rect(LABEL, 0, width - LABEL, layout.height);
  context.clip();
  for (const bar of history.bars(view.from, view.until)) drawBar(context, bar, view, c, x, y, layout, words.selected);
  context.fillStyle = c.quiet;
  for (const at of history.batches) if (at >= view.from && at <= view.until) context.fillRect(x(at), top, 1, layout.height - top - 16);
  context.fillStyle = c.preempted;
  for (const at of history.restarts) if (at >= view.from && at <= view.until) context.fillRect(x(at) - 1, 0, 2, layout.height - 16);
  context.restore();
  context.fillStyle = c.quiet;
  for (const group of layout.groups) {
    if (high >= 11) for (let lane = 0; lane < group.seats; lane++) context.fillText(`${words.seats} ${lane + 1}`, 2, group.top + (lane + 0.5) * high);
    else context.fillText(words.seats, 2, group.top + 8);
  }
  if (layout.queue) context.fillText(words.queue, 2, layout.high / 2);
  drawAxis(context, view, c, x, width, layout.height - 16);
  drawCursor(context, view, c, x, layout.height - 16);
}

/** The times in which a replica was not ready. @param {CanvasRenderingContext2D} context
 * @param {import("./history.js").Replica} replica @param {Window} view @param {Colours} c
 * @param {(time: number) => number} x @param {number} width @param {number} top @param {number} high */
function drawAbsences(context, replica, view, c, x, width, top, high) {
  context.fillStyle = c.preempted;
  for (const { from, to } of replica.absences) {
    const end = Math.min(to ?? view.until, view.until);
    if (from > view.until || end < view.from) continue;
    const left = Math.max(LABEL, x(from));
    const right = Math.min(width, x(end));
    context.globalAlpha = 0.22;
    context.fillRect(left, top, right - left, high);
    context.globalAlpha = 1;
    if (from >= view.from) context.fillRect(left - 1, top, 2, high);
  }
}

/** @param {CanvasRenderingContext2D} context @param {import("./history.js").Bar} bar @param {Window} view
 * @param {Colours} c @param {(time: number) => number} x @param {(span: import("./history.js").Span) => number} y
 * @param {{high: number, queue: number}} layout @param {number | null} selected */
function drawBar(context, bar, view, c, x, y, layout, selected) {
  for (const span of bar.spans) {
    const to = Math.min(span.to ?? view.until, view.until);
    if (span.from > view.until || to < view.from || span.lane < -layout.queue) continue;
    const left = x(Math.max(span.from, view.from));
    const wide = Math.max(span.kind === "cached" ? 4 : 0.6, x(to) - left);
    const up = y(span) + 1;
    const high = layout.high - 3;
    if (span.kind === "waiting" || span.kind === "preempted") {
      context.fillStyle = span.kind === "waiting" ? c.waiting : c.preempted;
      context.fillRect(left, up + high / 3, wide, high / 3);
    } else if (span.kind === "prompt") {
      context.fillStyle = c.line;
      context.fillRect(left, up, wide, high);
    } else if (span.kind === "cached") {
      context.fillStyle = c.cached;
      context.fillRect(left, up, wide, high);
    } else if (span.kind === "chunk") {
      context.fillStyle = c.prompt;
      context.fillRect(left, up, wide, high);
    } else {
      context.fillStyle = hue(bar.number, c);
      context.fillRect(left, up, wide, high);
      if (wide > 40 && high > 9) {
        context.fillStyle = c.isDark ? "#0d0e10" : "#101113";
        const name = bar.name ? bar.name.slice(bar.name.lastIndexOf("-") + 1).slice(-6) : "·";
        context.fillText(wide > 90 ? `${name} · ${bar.output}` : name, left + 4, up + high / 2 + 0.5, wide - 6);
      }
    }
    if (bar.number === selected) {
      context.strokeStyle = c.text;
      context.strokeRect(left, up, wide, high);
    }
  }
}

/** @param {CanvasRenderingContext2D} context @param {Window} view @param {Colours} c
 * @param {(time: number) => number} x @param {number} width @param {number} top */
function drawAxis(context, view, c, x, width, top) {
  const span = view.to - view.from;
  const steps = [10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 30000, 60000, 120000];
  const every = steps.find((each) => (each / span) * (width - LABEL) > 70) ?? 300000;
  context.fillStyle = c.quiet;
  const zero = view.zero ?? 0;
  for (let at = Math.ceil((view.from - zero) / every) * every + zero; at < view.to; at += every) {
    const seconds = (at - zero) / 1000;
    const text = every < 1000 ? `${seconds.toFixed(every < 100 ? 2 : 1)} s` : `${Math.round(seconds)} s`;
    context.fillRect(x(at), top, 0.5, 4);
    context.fillText(text, x(at) + 3, top + 9);
  }
}

/** @param {CanvasRenderingContext2D} context @param {Window} view @param {Colours} c
 * @param {(time: number) => number} x @param {number} height */
function drawCursor(context, view, c, x, height) {
  if (view.cursor === null || view.cursor < view.from || view.cursor > view.to) return;
  context.fillStyle = c.accent;
  context.fillRect(x(view.cursor) - 0.5, 0, 1, height);
}

/** @typedef {{label: string, value: string, colour: string[], kind: "bars" | "line" | "dots",
 * name?: string, replica?: import("./history.js").Replica,
 * points: (put: (at: number, wide: number, values: number[]) => void, from: number, to: number) => void}} Chart */

const CHART = 44;

/** The chart at a height. @param {Chart[]} charts @param {number} y */
export function chartAt(charts, y) {
  return charts[Math.floor(y / CHART)];
}

/** @param {Chart[]} charts */
export function chartsHeight(charts) {
  return charts.length * CHART;
}

/** Charts one above the other. @param {HTMLCanvasElement} canvas @param {Chart[]} charts
 * @param {Window} view @param {Colours} c */
export function drawCharts(canvas, charts, view, c) {
  const { context, width } = fit(canvas, chartsHeight(charts));
  const x = xOf(context, view, width);
  context.font = `11px ${c.font}`;
  context.textBaseline = "middle";
  charts.forEach((chart, index) => drawChart(context, chart, view, c, x, width, index * CHART));
  drawCursor(context, view, c, x, chartsHeight(charts));
}

/** @param {CanvasRenderingContext2D} context @param {Chart} chart @param {Window} view @param {Colours} c
 * @param {(time: number) => number} x @param {number} width @param {number} top */
function drawChart(context, chart, view, c, x, width, top) {
  const room = CHART - 10;
  if (chart.replica) drawAbsences(context, chart.replica, view, c, x, width, top + 2, CHART - 6);
  const columns = Math.max(1, Math.floor(width - LABEL));
  // The largest value of each column of pixels, so that no short peak is lost.
  /** @type {Float64Array[]} */
  const peaks = chart.colour.map(() => new Float64Array(columns).fill(Number.NaN));
  chart.points((at, wide, values) => {
    const begin = Math.max(0, Math.floor(x(at) - LABEL));
    const end = Math.min(columns - 1, Math.max(begin, Math.floor(x(at + wide) - LABEL)));
    for (let column = begin; column <= end; column++) {
      values.forEach((value, k) => {
        if (!(peaks[k][column] >= value)) peaks[k][column] = value;
      });
    }
  }, view.from, view.until);
  let most = 0;
  for (let column = 0; column < columns; column++) {
    let sum = 0;
    for (const each of peaks) sum = chart.kind === "bars" ? sum + (each[column] || 0) : Math.max(sum, each[column] || 0);
    most = Math.max(most, sum);
  }
  const scale = most ? room / most : 0;
  const bases = new Float64Array(columns).fill(top + CHART - 4);
  peaks.forEach((each, k) => {
    context.fillStyle = chart.colour[k];
    // Neighbours of one height are one rectangle: most columns are as high as the one before.
    for (let column = 0, end = 1; column < columns; column = end++) {
      const [value, base] = [each[column], bases[column]];
      while (end < columns && each[end] === value && bases[end] === base) end++;
      const high = value * scale;
      if (Number.isNaN(value)) continue;
      if (chart.kind === "dots") {
        for (let i = column; i < end; i++) context.fillRect(LABEL + i - 1, base - high - 1, 2.5, 2.5);
      } else if (chart.kind === "line") context.fillRect(LABEL + column, base - high, end - column, Math.max(1, k ? 1.5 : high));
      else if (high > 0) {
        context.fillRect(LABEL + column, base - high, end - column, high);
        bases.fill(base - high, column, end);
      }
    }
  });
  context.fillStyle = c.line;
  context.fillRect(LABEL, top + CHART - 4, width - LABEL, 0.5);
  const lines = chart.name ? [8, 21, 34] : [0, 12, 28];
  context.fillStyle = c.quiet;
  context.fillText(chart.label, 2, top + lines[1], LABEL - 6);
  context.fillStyle = c.text;
  if (chart.name) context.fillText(chart.name, 2, top + lines[0], LABEL - 6);
  context.fillText(chart.value, 2, top + lines[2], LABEL - 6);
}
