/** The picture of a request's time: waiting, its prompt, decoding. */

import { html, nothing } from "../vendor/core.js";
import { duration, t } from "../lib/i18n.js";

/** @param {any} trace of `/v1/requests/ID` */
export function picture(trace) {
  const total = trace.total_ms ?? Math.max(1, ...trace.events.map((/** @type {any} */ event) => event.at_ms));
  if (!total) return nothing;
  const admitted = trace.admitted_ms ?? total;
  const first = trace.first_token_ms ?? total;
  /** @param {number} ms */
  const x = (ms) => Math.round((1000 * Math.min(ms, total)) / total);
  const parts = [
    ["queue", 0, admitted], ["prompt", admitted, first], ["decode", first, total],
  ];
  const text = parts.map(([name, from, to]) => `${t(`happened.${name}`)} ${duration(Number(to) - Number(from))}`).join(", ");
  return html`<svg class="timeline-bar" viewBox="0 0 1000 46" preserveAspectRatio="none" role="img" aria-label=${text}>
      ${parts.map(([name, from, to]) => bar(String(name), x(Number(from)), x(Number(to))))}
      ${trace.slowest_gaps.map((/** @type {any} */ gap) => mark(x(gap.at_ms)))}
    </svg>
    <p class="legend">${parts.map(([name, from, to]) => html`<span class=${String(name)}>${t(`happened.${name}`)} ${duration(Number(to) - Number(from))}</span>`)}</p>`;
}

/** @param {string} name @param {number} from @param {number} to */
function bar(name, from, to) {
  const shape = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  const fields = { class: name, x: from, y: 8, width: Math.max(0, to - from), height: 30, rx: 2 };
  for (const [key, value] of Object.entries(fields)) shape.setAttribute(key, String(value));
  return shape;
}

/** @param {number} at */
function mark(at) {
  const shape = document.createElementNS("http://www.w3.org/2000/svg", "path");
  shape.setAttribute("class", "mark");
  shape.setAttribute("d", `M${at} 4v38`);
  shape.setAttribute("vector-effect", "non-scaling-stroke");
  return shape;
}
