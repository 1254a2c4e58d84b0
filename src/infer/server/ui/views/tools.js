/** `<tool-calls>`: the calls of an answer, and fields for what they gave. */

import { html, nothing } from "../vendor/core.js";
import { chats } from "../lib/chats.js";
import { PageElement } from "../lib/element.js";
import { t } from "../lib/i18n.js";
import { plainLine } from "../lib/records.js";
import { isWhole, parsed } from "../lib/request.js";

class ToolCalls extends PageElement {
  static properties = { message: { attribute: false } };

  constructor() {
    super();
    /** @type {import("../lib/records.js").Message | undefined} */
    this.message = undefined;
    /** Calls that have run, by their place. @type {Set<number>} */
    this._done = new Set();
    this.hears(chats, "change");
  }

  /** @param {Map<string, any>} changed */
  willUpdate(changed) {
    if (changed.has("message") && changed.get("message")?.id !== this.message?.id) this._done.clear();
    if (this.message?.toolCalls?.some((call) => call.function.name.includes("__"))) void import("./mcp_call.js");
  }

  render() {
    const calls = this.message?.toolCalls ?? [];
    const isAnswered = chats.tree?.children(this.message?.id ?? null).length;
    const canAnswer = calls.every(isWhole) && !isAnswered && this.message?.finish !== "running" && !chats.isBusy(this.message?.conversation ?? "");
    return html`<div class="stack">${calls.map((call, i) => {
      const value = parsed(call.function.arguments);
      const name = plainLine(call.function.name);
      return html`<div class="call">
        <p>${t("tool.call", { name })}</p>
        <pre tabindex="0" aria-label=${t("tool.arguments")}>${value === undefined ? call.function.arguments : JSON.stringify(value, null, 2)}</pre>
        ${canAnswer ? html`<mcp-call .call=${call} .message=${this.message} @result=${(/** @type {CustomEvent} */ event) => this._given(i, event.detail)}></mcp-call>
          <label class="field">${t("tool.result-of", { name })}
          <textarea rows="2" dir="auto" data-call=${i}></textarea></label>` : nothing}
      </div>`;
    })}
    ${canAnswer ? html`<div class="row"><button class="main" @click=${this._send}>${t("tool.send")}</button></div>` : nothing}</div>`;
  }

  /** A call has run: once all have, what they gave goes back. @param {number} i @param {{text: string, isLate: boolean}} given */
  _given(i, { text, isLate }) {
    const field = /** @type {HTMLTextAreaElement | null} */ (this.querySelector(`textarea[data-call="${i}"]`));
    if (!field || chats.tree?.conversation.id !== this.message?.conversation) return;
    field.value = text;
    this._done.add(i);
    if (this._done.size === this.message?.toolCalls?.length && !isLate) this._send();
  }

  _send() {
    const { message } = this;
    if (!message?.toolCalls) return;
    const fields = /** @type {HTMLTextAreaElement[]} */ ([...this.querySelectorAll("textarea")]);
    const calls = message.toolCalls;
    void chats.sendResults(message, fields.map((field, i) => ({ id: calls[i].id, text: field.value })));
  }
}

customElements.define("tool-calls", ToolCalls);
