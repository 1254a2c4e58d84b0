/** The charts below the lanes: tokens of each step, pages, queue, speed and latencies. */

import { duration, number, rate, t } from "../lib/i18n.js";

/** @typedef {import("./draw.js").Chart} Chart */

const BIN_MS = 500;
const RECENT_MS = 60_000;

/** @param {number | null} ms */
const bound = (ms) => (ms === null ? "–" : Number.isFinite(ms) ? `≤ ${duration(ms)}` : `> ${duration(2500)}`);

/** The charts of one engine's steps; those of several have its name.
 * @param {import("./history.js").History} history @param {string} name @param {import("./draw.js").Window} view
 * @param {import("./draw.js").Colours} c @returns {Chart[]} */
function ofReplica(history, name, view, c) {
  const replica = history.replica(name);
  const { steps, pages } = replica;
  const latest = history.stepAt(view.until, name)?.step;
  const where = name ? { name, replica } : {};
  /** @param {(step: import("./history.js").Step) => number[]} values @returns {Chart["points"]} */
  const ofSteps = (values) => (put, from, to) => {
    for (let i = Math.max(0, steps.from(from) - 1); i < steps.at.length && steps.at[i] <= to; i++) {
      put(steps.at[i], steps.values[i].ms, values(steps.values[i]));
    }
  };
  return [
    {
      ...where, label: t("engine.chart.tokens"), kind: "bars", colour: [c.prompt, c.decode],
      value: latest ? number((latest.prompt + latest.sequences) / latest.count) : "–",
      points: ofSteps((step) => [step.prompt / step.count, step.sequences / step.count]),
    },
    {
      ...where, label: t("engine.chart.pages"), kind: "line", colour: [c.accent],
      value: pages ? number(1 - (latest?.free ?? pages) / pages, { style: "percent" }) : "–",
      points: ofSteps((step) => [pages - step.free]),
    },
  ];
}

/** The charts of each engine, and those of all together.
 * @param {import("./history.js").History} history @param {import("./draw.js").Window} view
 * @param {import("./draw.js").Colours} c @returns {Chart[]} */
export function chartsOf(history, view, c) {
  const { gauges } = history;
  const recent = view.until - RECENT_MS;
  const first = history.firstPercentile(0.5, recent, view.until);
  return [
    ...[...history.replicas.keys()].flatMap((name) => ofReplica(history, name, view, c)),
    {
      label: t("engine.chart.queue"), kind: "line", colour: [c.waiting],
      value: number((gauges.waiting ?? 0) + (gauges.preempted ?? 0)),
      points: (put, from, to) => {
        const { at, values } = history.queue;
        for (let i = Math.max(0, history.queue.from(from) - 1); i < at.length && at[i] <= to; i++) {
          put(at[i], (at[i + 1] ?? to) - at[i], [values[i].waiting]);
        }
      },
    },
    {
      label: t("engine.chart.speed"), kind: "line", colour: [c.decode],
      value: rate(history.rate(Math.max(view.until - 5000, history.start), view.until)),
      points: (put, from, to) => {
        for (let at = Math.floor(from / BIN_MS) * BIN_MS; at < to; at += BIN_MS) {
          if (at + BIN_MS > history.start) put(at, BIN_MS, [history.rate(at, at + BIN_MS)]);
        }
      },
    },
    {
      label: t("engine.chart.first"), kind: "dots", colour: [c.cached],
      value: first === null ? "–" : duration(first),
      points: (put, from, to) => {
        const { at, values } = history.first;
        for (let i = history.first.from(from); i < at.length && at[i] <= to; i++) put(at[i], 0, [values[i]]);
      },
    },
    {
      label: t("engine.chart.gap"), kind: "dots", colour: [c.preempted],
      value: bound(history.gapPercentile(0.99, recent, view.until)),
      points: (put, from, to) => {
        const { at, values } = history.gaps;
        const bounds = history.hello.gap_bounds_ms;
        for (let i = history.gaps.from(from); i < at.length && at[i] <= to; i++) {
          const slowest = values[i].findLastIndex((count) => count > 0);
          put(at[i], 0, [bounds[Math.min(slowest, bounds.length - 1)]]);
        }
      },
    },
  ];
}
