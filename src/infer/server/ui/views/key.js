/** `<key-dialog>`: the API key, in memory or in this tab's storage. */

import { html, nothing } from "../vendor/core.js";
import { apiKey, server } from "../lib/api.js";
import { t } from "../lib/i18n.js";
import { PageDialog } from "./dialog.js";

class KeyDialog extends PageDialog {
  static properties = { isWrong: { state: true }, isBusy: { state: true } };

  constructor() {
    super();
    this.isWrong = false;
    this.isBusy = false;
  }

  get heading() {
    return "key.title";
  }

  content() {
    return html`
      <p class="quiet">${t("key.why")}</p>
      <label class="field">${t("key.label")}
        <input type="password" class="key" autocomplete="off" spellcheck="false" .value=${apiKey.value}
          aria-invalid=${this.isWrong} aria-describedby="key-fault"
          @keydown=${(/** @type {KeyboardEvent} */ event) => { if (event.key === "Enter") void this._use(); }}>
        <span class="fault-text" id="key-fault" role="alert">${this.isWrong ? t("key.wrong") : nothing}</span></label>
      <label class="check"><input type="checkbox" class="remember"> ${t("key.remember")}</label>
    `;
  }

  footer() {
    return html`${apiKey.value ? html`<button class="danger" @click=${() => { apiKey.set("", false); this.close(); }}>${t("key.forget")}</button>` : nothing}
      <button class="main" ?disabled=${this.isBusy} @click=${this._use}>${t("key.use")}</button>`;
  }

  async _use() {
    const value = /** @type {HTMLInputElement} */ (this.querySelector("input.key")).value;
    const remember = /** @type {HTMLInputElement} */ (this.querySelector("input.remember")).checked;
    this.isBusy = true;
    apiKey.set(value, remember);
    await server.refresh();
    this.isBusy = false;
    this.isWrong = server.error?.kind === "key";
    if (!this.isWrong) this.close();
  }
}

customElements.define("key-dialog", KeyDialog);
