/** `<transfer-panel>`: export and import of conversations. */

import { html, nothing } from "../vendor/core.js";
import { chats } from "../lib/chats.js";
import { PageElement } from "../lib/element.js";
import { t } from "../lib/i18n.js";
import { plainLine } from "../lib/records.js";
import { storage } from "../lib/storage.js";
import { asMarkdown, exported, imported, isHere } from "../lib/transfer.js";

class TransferPanel extends PageElement {
  static properties = { said: { state: true }, isBad: { state: true } };

  constructor() {
    super();
    this.said = "";
    this.isBad = false;
  }

  render() {
    return html`<div class="row" role="group" aria-label=${t("transfer.title")}>
        <button class="plain" @click=${this._export}>${t("transfer.export")}</button>
        <button class="plain" ?disabled=${!chats.tree?.byId.size} @click=${this._markdown}>${t("transfer.markdown")}</button>
        <button class="plain" @click=${() => /** @type {HTMLElement} */ (this.querySelector("input")).click()}>${t("transfer.import")}</button>
        <input type="file" hidden accept=".json,application/json" aria-label=${t("transfer.import")} @change=${this._picked}>
      </div>
      ${this.said ? html`<p class=${this.isBad ? "notice bad" : "notice"} role="status">${this.said}</p>` : nothing}`;
  }

  async _export() {
    save("infer-conversations.json", "application/json", await exported([...chats.all.values()]));
  }

  _markdown() {
    const { tree } = chats;
    if (!tree) return;
    const { title } = tree.conversation;
    const name = plainLine(title).replace(/[^\p{L}\p{N} _-]/gu, "").trim().slice(0, 60) || "conversation";
    save(`${name}.md`, "text/markdown", asMarkdown(title, tree.path(), (role) => t(`role.${role}`)));
  }

  /** @param {Event} event */
  async _picked(event) {
    const field = /** @type {HTMLInputElement} */ (event.target);
    const file = field.files?.[0];
    field.value = "";
    if (!file) return;
    try {
      const { found, leftOut } = imported(await file.text());
      let numHere = 0;
      for (const read of found) {
        const { conversation, messages, origin } = read;
        if (await isHere(read, [...chats.all.values()])) numHere += 1;
        else await storage.write({ ...conversation, origin }, messages);
      }
      await chats.refresh();
      this.isBad = !found.length;
      this.said = t("transfer.done", { n: found.length - numHere });
      if (numHere) this.said += ` ${t("transfer.here", { n: numHere })}`;
      if (leftOut.length) this.said += ` ${t("transfer.left-out", { names: leftOut.slice(0, 10).join(", ") })}`;
    } catch (error) {
      this.isBad = true;
      this.said = t("transfer.wrong", { why: plainLine(String(error instanceof Error ? error.message : error)).slice(0, 120) });
    }
  }
}

/** Let the browser save a text as a file. @param {string} name @param {string} type @param {string} text */
function save(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

customElements.define("transfer-panel", TransferPanel);
