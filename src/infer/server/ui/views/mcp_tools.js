/** `<mcp-tools>`: the tools of MCP servers, to switch on for a conversation. Sends `switched`. */

import { html, nothing } from "../vendor/core.js";
import { PageElement } from "../lib/element.js";
import { t } from "../lib/i18n.js";
import { calledAs, mcp } from "../lib/mcp.js";
import { plainLine } from "../lib/records.js";
import { parsed } from "../lib/request.js";

class McpTools extends PageElement {
  static properties = { conversation: { attribute: false } };

  constructor() {
    super();
    /** @type {import("../lib/records.js").Conversation | undefined} */
    this.conversation = undefined;
    this.hears(mcp, "change");
  }

  connectedCallback() {
    super.connectedCallback();
    void mcp.load();
  }

  render() {
    const { conversation } = this;
    if (!conversation || !mcp.servers.length) return nothing;
    const isWrong = Boolean(conversation.tools.trim()) && !Array.isArray(parsed(conversation.tools));
    return mcp.servers.map((server) => html`<fieldset class="mcp-tools" ?disabled=${isWrong}>
      <legend>${t("mcp.tools-of", { server: server.name })}</legend>
      ${server.error ? html`<p class="fault-text" role="alert" dir="auto">${plainLine(server.error)}</p>` : nothing}
      ${server.tools.map((tool) => html`<label class="check"><input type="checkbox" .checked=${mcp.has(conversation, calledAs(server.name, tool.name))}
        @change=${(/** @type {Event} */ event) => this._switch(server, tool, /** @type {HTMLInputElement} */ (event.target).checked)}>
        <span dir="auto">${tool.name} <span class="quiet small">${plainLine(tool.description).slice(0, 200)}</span></span></label>`)}
      ${server.left_out.map((each) => html`<p class="quiet small">${t("mcp.left-out", { name: each.name || "?", reason: each.reason })}</p>`)}
      <p class="hint">${t("mcp.hint")}</p></fieldset>`);
  }

  /** @param {import("../lib/mcp.js").McpServer} server @param {import("../lib/mcp.js").Tool} tool @param {boolean} isOn */
  _switch(server, tool, isOn) {
    if (this.conversation) mcp.set(this.conversation, server, tool, isOn);
    this.dispatchEvent(new Event("switched"));
    this.requestUpdate();
  }
}

customElements.define("mcp-tools", McpTools);
