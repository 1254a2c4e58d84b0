/** `<mcp-call>`: asks the reader whether a call of an MCP server's tool may run, and runs it. Sends `result`: its
 * text, and whether there were so many rounds that the reader sends it. */

import { html, nothing } from "../vendor/core.js";
import { chats } from "../lib/chats.js";
import { PageElement } from "../lib/element.js";
import { t } from "../lib/i18n.js";
import { MAX_ROUNDS, mcp, roundsOf, saidBy } from "../lib/mcp.js";

class McpCall extends PageElement {
  static properties = { call: { attribute: false }, message: { attribute: false }, fault: { state: true } };

  constructor() {
    super();
    /** @type {import("../lib/records.js").ToolCall | undefined} */
    this.call = undefined;
    /** The answer that calls. @type {import("../lib/records.js").Message | undefined} */
    this.message = undefined;
    this.fault = "";
    /** @type {AbortController | null} */
    this._running = null;
    this.hears(mcp, "change");
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    this._stop();
  }

  /** @param {Map<string, any>} changed */
  willUpdate(changed) {
    if (!changed.has("call") || changed.get("call")?.id === this.call?.id) return;
    this._stop();
    // Not when it is connected: what was made before its class was there has its call later.
    if (!mcp.isKnown && this.call?.function.name.includes("__")) void mcp.load();
  }

  render() {
    const found = mcp.find(this.call?.function.name ?? "");
    if (!found) return nothing;
    return html`<div class="row mcp-call" role="group" aria-label=${t("mcp.ask", found)}>
      <span class="grow">${this._running ? t("mcp.runs", found) : t("mcp.ask", found)}</span>
      ${this._running
        ? html`<button class="plain" @click=${this._stop}>${t("mcp.stop")}</button>`
        : html`<button class="main" @click=${() => this._run(found)}>${t("mcp.run")}</button>
          <button class="plain" @click=${() => this._give(t("mcp.declined"))}>${t("mcp.decline")}</button>`}
      ${this._isLate ? html`<span class="quiet small">${t("mcp.rounds", { n: MAX_ROUNDS })}</span>` : nothing}
      ${this.fault ? html`<span class="fault-text" role="alert" dir="auto">${this.fault}</span>` : nothing}</div>`;
  }

  get _isLate() {
    const path = chats.tree?.path() ?? [];
    return roundsOf(path.slice(0, path.findIndex((each) => each.id === this.message?.id) + 1)) > MAX_ROUNDS;
  }

  _stop() {
    this._running?.abort();
    this._running = null;
    this.fault = "";
    this.requestUpdate();
  }

  /** @param {{server: string, tool: string}} found */
  async _run(found) {
    const running = (this._running = new AbortController());
    this.fault = "";
    this.requestUpdate();
    try {
      const text = await mcp.call(found, this.call?.function.arguments ?? "", running.signal);
      if (this._running === running) this._give(text);
    } catch (error) {
      if (this._running === running) this.fault = saidBy(error);
    }
    if (this._running === running) this._running = null;
    this.requestUpdate();
  }

  /** @param {string} text */
  _give(text) {
    this.dispatchEvent(new CustomEvent("result", { detail: { text, isLate: this._isLate } }));
  }
}

customElements.define("mcp-call", McpCall);
