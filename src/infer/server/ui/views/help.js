/** `<help-dialog>`: the keys, the language and the colours. */

import { html } from "../vendor/core.js";
import { LANGUAGES, language, t } from "../lib/i18n.js";
import { keep, recall } from "../lib/local.js";
import { PageDialog } from "./dialog.js";

const KEYS = [
  ["Enter", "keys.send"], ["Shift + Enter", "keys.line"], ["Esc", "keys.stop"], ["↑", "keys.edit"],
  ["/", "keys.field"], ["Ctrl + K", "keys.search"], ["Ctrl + Shift + O", "keys.new"], ["F2", "keys.rename"], ["Delete", "keys.remove"], ["?", "keys.help"],
];

class HelpDialog extends PageDialog {
  get heading() {
    return "help.title";
  }

  content() {
    const theme = recall("theme", "");
    return html`
      <div class="grid">
        <label class="field">${t("help.language")}
          <select @change=${(/** @type {Event} */ event) => language.choose(/** @type {HTMLSelectElement} */ (event.target).value)}>
            ${Object.entries(LANGUAGES).map(([code, name]) => html`<option value=${code} lang=${code} ?selected=${code === language.code}>${name}</option>`)}
          </select></label>
        <label class="field">${t("help.theme")}
          <select @change=${(/** @type {Event} */ event) => this._theme(/** @type {HTMLSelectElement} */ (event.target).value)}>
            ${["", "light", "dark"].map((each) => html`<option value=${each} ?selected=${each === theme}>${t(`theme.${each || "system"}`)}</option>`)}
          </select></label>
      </div>
      <section class="stack"><h3>${t("keys.title")}</h3>
        <dl class="keys">${KEYS.map(([key, text]) => html`<dt><kbd>${key}</kbd></dt><dd>${t(text)}</dd>`)}</dl></section>
      <p class="quiet small">${t("help.privacy")}</p>
    `;
  }

  /** @param {string} theme */
  _theme(theme) {
    keep("theme", theme);
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
  }
}

customElements.define("help-dialog", HelpDialog);
