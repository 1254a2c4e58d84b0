/** `<token-view>`: the tokens of an answer with their probabilities, and what else was possible. */

import { html, nothing } from "../vendor/core.js";
import { ApiError } from "../lib/api.js";
import { chats } from "../lib/chats.js";
import { PageElement } from "../lib/element.js";
import { sentence } from "../lib/errors.js";
import { number, t } from "../lib/i18n.js";
import { MAX_TOKENS, scored, shade, textOf } from "../lib/token_text.js";

/** @typedef {import("../lib/token_text.js").Token} Token */

class TokenView extends PageElement {
  static properties = {
    message: { attribute: false }, ids: { attribute: false }, model: { attribute: false },
    tokens: { state: true }, error: { state: true }, at: { state: true }, hasPrompt: { state: true },
  };

  constructor() {
    super();
    /** @type {import("../lib/records.js").Message | undefined} */
    this.message = undefined;
    /** Token ids without a message: of a raw text. @type {number[] | undefined} */
    this.ids = undefined;
    this.model = "";
    /** @type {Token[] | null} */
    this.tokens = null;
    /** @type {ApiError | null} */
    this.error = null;
    /** Place of the token whose alternatives are shown; -1 = none. */
    this.at = -1;
    this.hasPrompt = false;
    this._abort = new AbortController();
  }

  firstUpdated() {
    void this._read();
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    this._abort.abort();
  }

  get numPrompt() {
    return this.message?.promptIds?.length ?? 0;
  }

  async _read() {
    const all = this.ids ?? [...(this.message?.promptIds ?? []), ...(this.message?.tokenIds ?? [])];
    try {
      const model = this.message?.figures?.model || this.model;
      this.tokens = await scored(model, all.slice(0, this.numPrompt + MAX_TOKENS), this._abort.signal);
    } catch (error) {
      if (!this._abort.signal.aborted) this.error = error instanceof ApiError ? error : new ApiError("failed", String(error));
    }
  }

  render() {
    return html`<section class="panel" aria-label=${t("tokens.button")}>${this._content()}</section>`;
  }

  _content() {
    if (this.error) return html`<p class="bad small">${sentence(this.error)}</p>`;
    if (!this.tokens) return html`<p class="quiet small">${t("tokens.loading")}</p>`;
    const from = this.hasPrompt || this.ids ? 0 : this.numPrompt;
    const shown = this.tokens.slice(from, from + MAX_TOKENS + this.numPrompt);
    const isCut = (this.message?.tokenIds?.length ?? 0) > MAX_TOKENS;
    return html`
      <p class="quiet small">${t("tokens.hint")}</p>
      <div class="row small">
        <span class="scale"><span class="p0">${t("tokens.unlikely")}</span><span class="p1">·</span><span class="p2">·</span><span class="p3">·</span><span class="p4">${t("tokens.likely")}</span></span>
        ${this.message ? html`<label class="check"><input type="checkbox" .checked=${this.hasPrompt}
          @change=${(/** @type {Event} */ event) => { this.hasPrompt = /** @type {HTMLInputElement} */ (event.target).checked; }}> ${t("tokens.prompt")}</label>` : nothing}
      </div>
      <div class="tokens" dir="auto" @keydown=${this._key}>${shown.map((token, i) => this._token(token, from + i))}</div>
      ${isCut ? html`<p class="quiet small">${t("tokens.shown", { n: MAX_TOKENS })}</p>` : nothing}
      ${this.at >= 0 ? this._alternatives(this.tokens[this.at], this.at) : nothing}
    `;
  }

  /** @param {Token} token @param {number} at */
  _token(token, at) {
    const classes = `${shade(token.logprob)} ${at < this.numPrompt ? "given" : ""} ${at === this.at ? "chosen" : ""}`;
    const isFirst = at === (this.at >= 0 ? this.at : this.hasPrompt || this.ids ? 0 : this.numPrompt);
    return html`<button class=${classes} tabindex=${isFirst ? 0 : -1} aria-pressed=${at === this.at}
      @click=${() => { this.at = at === this.at ? -1 : at; }}>${visible(token.label)}</button>`;
  }

  /** @param {KeyboardEvent} event */
  _key(event) {
    const steps = /** @type {Record<string, number>} */ ({ ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 });
    const step = steps[event.key];
    if (!step) return;
    const all = /** @type {HTMLElement[]} */ ([...this.querySelectorAll(".tokens button")]);
    const next = all[all.indexOf(/** @type {HTMLElement} */ (event.target)) + step];
    next?.focus();
    event.preventDefault();
  }

  /** @param {Token} token @param {number} at */
  _alternatives(token, at) {
    const canGoOn = this.message && at >= this.numPrompt && !chats.isBusy(this.message.conversation)
      && !chats.current?.session && !this.message.reasoning && !this.message.toolCalls?.length;
    return html`<div class="choices">
      <h3>${t("tokens.alternatives", { n: at - this.numPrompt + 1 })}</h3>
      <table class="alternatives small"><thead><tr><th scope="col">${t("tokens.text")}</th><th scope="col">${t("tokens.id")}</th><th scope="col" colspan="2">${t("tokens.chance")}</th><td></td></tr></thead>
      <tbody>${token.others.map((each) => html`<tr>
        <td class="mono">${visible(each.label)}${each.id === token.id ? html` <span class="quiet">(${t("tokens.this")})</span>` : nothing}</td>
        <td>${each.id}</td>
        <td>${chance(each.logprob)}</td>
        <td class="bar"><progress max="1" value=${Math.exp(each.logprob)} aria-label=${t("tokens.chance")}></progress></td>
        <td>${canGoOn && each.id !== token.id ? html`<button class="plain" @click=${() => this._goOn(at, each)}>${t("tokens.go-on")}</button>` : nothing}</td>
      </tr>`)}</tbody></table></div>`;
  }

  /** @param {number} at @param {{id: number, label: string}} other */
  _goOn(at, other) {
    const { message, tokens } = this;
    if (!message || !tokens) return;
    const kept = tokens.slice(this.numPrompt, at);
    void chats.goOn(message, {
      ids: [...kept.map((each) => each.id), other.id],
      text: textOf([...kept.map((each) => each.label), other.label]),
    });
  }
}

/** A probability in per cent. @param {number} logprob */
function chance(logprob) {
  const value = Math.exp(logprob);
  return value < 0.001 ? `<${number(0.001, { style: "percent" })}` : number(value, { style: "percent" });
}

/** A token's text with its spaces and line ends to be seen. @param {string} label */
function visible(label) {
  if (!label) return "∅";
  return label.replaceAll("\n", "↵\n").replaceAll("\t", "⇥").replace(/^ | $/g, "·");
}

customElements.define("token-view", TokenView);
