/** `<engine-table>`: the engine's requests as a table, for those who cannot see lanes. */

import { html, nothing } from "../vendor/core.js";
import { PageElement } from "../lib/element.js";
import { duration, number, t } from "../lib/i18n.js";

const COLUMNS = ["request", "state", "seat", "prompt", "cached", "output", "age"];

class EngineTable extends PageElement {
  static properties = { history: { attribute: false }, until: { attribute: false } };

  constructor() {
    super();
    /** @type {import("../engine/history.js").History | null} */
    this.history = null;
    /** @type {() => number} */
    this.until = () => 0;
    this._timer = 0;
  }

  connectedCallback() {
    super.connectedCallback();
    this._timer = window.setInterval(() => this.requestUpdate(), 1000);
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    clearInterval(this._timer);
  }

  render() {
    const until = this.until();
    const columns = this.history?.hasReplicas ? [...COLUMNS.slice(0, 2), "replica", ...COLUMNS.slice(2)] : COLUMNS;
    const bars = [...(this.history?.open.values() ?? [])].slice(0, 300);
    return html`<div class="wide-table" tabindex="0" role="region" aria-label=${t("engine.table")}><table class="engine-table">
      <caption>${t("engine.table-caption", { n: bars.length })}</caption>
      <thead><tr>${columns.map((name) => html`<th scope="col">${t(`engine.column.${name}`)}</th>`)}</tr></thead>
      <tbody>${bars.map((bar) => html`<tr>
        <th scope="row" class="mono" dir="auto">${bar.name ?? t("engine.others", { n: bar.number })}</th>
        <td>${t(`engine.state.${bar.state}`)}</td>
        ${columns === COLUMNS ? nothing : html`<td dir="auto">${bar.replica || "–"}</td>`}
        <td>${bar.last && bar.last.lane >= 0 ? number(bar.last.lane + 1) : "–"}</td>
        <td>${number(bar.prompt)}</td><td>${number(bar.cached)}</td>
        <td>${number(bar.output)} / ${number(bar.most)}</td>
        <td>${duration(Math.max(0, until - bar.since))}</td></tr>`)}</tbody>
    </table></div>`;
  }
}

customElements.define("engine-table", EngineTable);
