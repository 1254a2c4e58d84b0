/** `PageElement`: the base of this page's elements. They render into the document itself, so that
 * one style sheet and one set of labels serve all of them. */

import { LitElement } from "../vendor/core.js";
import { language } from "./i18n.js";

export class PageElement extends LitElement {
  constructor() {
    super();
    /** @type {Array<[EventTarget, string]>} */
    this._heard = [];
    this._update = () => this.requestUpdate();
    this.hears(language, "change");
  }

  createRenderRoot() {
    this.replaceChildren();
    return this;
  }

  /** Render again whenever `target` sends an event of this type.
   * @param {EventTarget} target
   * @param {string} type */
  hears(target, type) {
    this._heard.push([target, type]);
    if (this.isConnected) target.addEventListener(type, this._update);
  }

  connectedCallback() {
    super.connectedCallback();
    for (const [target, type] of this._heard) target.addEventListener(type, this._update);
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    for (const [target, type] of this._heard) target.removeEventListener(type, this._update);
  }
}
