/** `<raw-view>`: a text that the model continues, without a chat template. */

import { html, live, nothing } from "../vendor/core.js";
import { ApiError, askJson, server } from "../lib/api.js";
import { PageElement } from "../lib/element.js";
import { sentence } from "../lib/errors.js";
import { Generation } from "../lib/generation.js";
import { t } from "../lib/i18n.js";
import { chats } from "../lib/chats.js";
import { modelOf, samplingOf, streaming } from "../lib/request.js";
import { storage } from "../lib/storage.js";
import { speech } from "../lib/speech.js";
import "./tokens.js";

/** Name of the draft that the text is kept as. */
const DRAFT = "text";
const DRAFT_MS = 150;

class RawView extends PageElement {
  static properties = { text: { state: true }, isBusy: { state: true }, error: { state: true }, ids: { state: true } };

  constructor() {
    super();
    this.text = "";
    this.most = 100;
    this.isBusy = false;
    /** @type {ApiError | null} */
    this.error = null;
    /** Token ids of the text whose probabilities are shown. @type {number[] | null} */
    this.ids = null;
    /** @type {Generation | null} */
    this._generation = null;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this._writing = undefined;
    this.hears(server, "change");
    this.hears(chats, "change");
    void storage.draft(DRAFT).then((found) => { if (found && !this.text) this.text = found.text; });
    addEventListener("pagehide", () => this._write());
  }

  /** Keep the text beyond a reload. @param {Map<string, unknown>} changed */
  updated(changed) {
    if (!changed.has("text") || changed.get("text") === undefined) return;
    clearTimeout(this._writing);
    this._writing = setTimeout(() => this._write(), DRAFT_MS);
  }

  _write() {
    void storage.writeDraft(DRAFT, this.text ? { text: this.text, files: [] } : null);
  }

  get _model() {
    return chats.current ? modelOf(chats.current) : server.current?.id ?? "";
  }

  render() {
    return html`<div class="page-body">
      <p class="quiet">${t("raw.hint")} ${t("raw.settings")}</p>
      <label class="field">${t("raw.label")}
        <textarea rows="12" dir="auto" .value=${live(this.text)} ?readonly=${this.isBusy}
          @input=${(/** @type {Event} */ event) => { this.text = /** @type {HTMLTextAreaElement} */ (event.target).value; this.ids = null; }}
          @keydown=${(/** @type {KeyboardEvent} */ event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) void this._complete(); }}></textarea></label>
      <div class="row">
        ${this.isBusy
          ? html`<button class="main" @click=${() => this._generation?.stop()}>${t("act.stop")}</button>`
          : html`<button class="main" ?disabled=${!this.text || !server.current} @click=${this._complete}>${t("raw.complete")}</button>`}
        <button class="plain" ?disabled=${!this.text || this.isBusy} @click=${this._tokens}>${t("raw.tokens")}</button>
        <button class="plain" ?disabled=${this.isBusy} @click=${() => { this.text = ""; this.ids = null; }}>${t("raw.clear")}</button>
        <label class="check small">${t("raw.most")} <input type="number" min="1" max="100000" .value=${String(this.most)}
          @change=${(/** @type {Event} */ event) => { this.most = Math.max(1, Number(/** @type {HTMLInputElement} */ (event.target).value) || 100); }}></label>
      </div>
      ${this.error ? html`<p class="notice bad" role="alert">${sentence(this.error)}</p>` : nothing}
      ${this.ids ? html`<token-view .ids=${this.ids} .model=${this._model}></token-view>` : nothing}
    </div>`;
  }

  async _complete() {
    if (this.isBusy || !this.text) return;
    const before = this.text;
    const message = { id: "raw", conversation: "", parent: null, role: /** @type {const} */ ("assistant"), content: "", created: 0 };
    const { reasoning_effort: _, ...sampling } = chats.current ? samplingOf(chats.current) : {};
    const body = { ...sampling, model: this._model, prompt: before, max_tokens: this.most, ...streaming(true) };
    const generation = (this._generation = new Generation([message], "/v1/completions", body, () => {}));
    generation.addEventListener("piece", () => { this.text = before + message.content; });
    this.error = null;
    this.ids = null;
    this.isBusy = true;
    speech.say(t("said.answering"));
    try {
      await generation.run();
    } catch (error) {
      this.error = error instanceof ApiError ? error : new ApiError("failed", String(error));
    }
    this.isBusy = false;
    speech.say(t("said.done"));
  }

  async _tokens() {
    try {
      this.error = null;
      this.ids = (await askJson("/tokenize", { body: { model: this._model, prompt: this.text } })).tokens;
    } catch (error) {
      this.error = error instanceof ApiError ? error : new ApiError("failed", String(error));
    }
  }
}

customElements.define("raw-view", RawView);
