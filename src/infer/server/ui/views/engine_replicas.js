/** `<engine-replicas>`: each of several engines that serve a model, and all together; empty where there is one. */

import { html, nothing } from "../vendor/core.js";
import { PageElement } from "../lib/element.js";
import { number, t } from "../lib/i18n.js";
import { FETCH_MS } from "../engine/frames.js";

const COUNTS = ["running", "waiting", "preempted", "pages", "cached", "restarts"];

/** @param {any} gauges @param {string} name */
function count(gauges, name) {
  if (name === "cached") return number(gauges.cached_pages ?? 0);
  if (name !== "pages") return number(gauges[name] ?? 0);
  return gauges.pages ? number(1 - gauges.free_pages / gauges.pages, { style: "percent", maximumFractionDigits: 0 }) : "–";
}

class EngineReplicas extends PageElement {
  static properties = { history: { attribute: false } };

  constructor() {
    super();
    /** @type {import("../engine/history.js").History | null} */
    this.history = null;
    this._timer = 0;
  }

  connectedCallback() {
    super.connectedCallback();
    this._timer = window.setInterval(() => { if (this.history?.hasReplicas) this.requestUpdate(); }, FETCH_MS);
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    clearInterval(this._timer);
  }

  render() {
    const gauges = this.history?.gauges;
    if (!gauges?.replicas) return nothing;
    const rows = [...Object.entries(gauges.replicas), [t("engine.all-replicas"), gauges]];
    return html`<div class="wide-table" tabindex="0" role="region" aria-label=${t("engine.replicas-caption")}><table class="engine-table">
      <caption>${t("engine.replicas-caption")}</caption>
      <thead><tr>${["replica", "state", ...COUNTS].map((name) => html`<th scope="col">${t(`engine.column.${name}`)}</th>`)}</tr></thead>
      <tbody>${rows.map(([name, each]) => html`<tr class=${each.ready ? "" : "bad"}>
        <th scope="row" dir="auto">${name}</th>
        <td>${t(each.ready ? "engine.ready" : "engine.not-ready")}</td>
        ${COUNTS.map((column) => html`<td>${count(each, column)}</td>`)}</tr>`)}</tbody>
    </table></div>`;
  }
}

customElements.define("engine-replicas", EngineReplicas);
