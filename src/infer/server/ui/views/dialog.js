/** `PageDialog`: the base of the page's dialogs. They are modal: the keyboard stays inside of them,
 * Escape closes them, and the focus goes back to where it was. */

import { html } from "../vendor/core.js";
import { PageElement } from "../lib/element.js";
import { glyphs } from "../lib/glyphs.js";
import { t } from "../lib/i18n.js";

export class PageDialog extends PageElement {
  constructor() {
    super();
    this._hasFocused = false;
  }

  /** Key of the dialog's title. */
  get heading() {
    return "";
  }

  firstUpdated() {
    /** @type {HTMLDialogElement} */ (this.querySelector("dialog")).showModal();
  }

  updated() {
    // A phone would show its keyboard over the dialog.
    if (this._hasFocused || !matchMedia("(pointer: fine)").matches) return;
    /** @type {HTMLElement | null} */
    const first = this.querySelector(".content :is(input, select, textarea):not([hidden])");
    first?.focus();
    this._hasFocused = Boolean(first); // it may come later
  }

  close() {
    /** @type {HTMLDialogElement} */ (this.querySelector("dialog")).close();
  }

  /** @returns {unknown} */
  content() {
    return "";
  }

  /** @returns {unknown} */
  footer() {
    return html`<button class="main" @click=${this.close}>${t("act.done")}</button>`;
  }

  render() {
    return html`<dialog aria-labelledby="dialog-title" @close=${() => this.dispatchEvent(new Event("close"))}>
      <div class="sheet">
        <header><h2 id="dialog-title">${t(this.heading)}</h2>
          <button class="icon" aria-label=${t("act.close")} @click=${this.close}>${glyphs.close()}</button></header>
        <div class="content" tabindex="0">${this.content()}</div>
        <footer>${this.footer()}</footer>
      </div>
    </dialog>`;
  }
}
