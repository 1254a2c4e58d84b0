/** `<chat-composer>`: the field for the next message, its files, its size in tokens, and errors. */

import { html, live, nothing } from "../vendor/core.js";
import { apiKey, server } from "../lib/api.js";
import { chats } from "../lib/chats.js";
import { PageElement } from "../lib/element.js";
import { sentence } from "../lib/errors.js";
import { NUM_ANSWERS } from "../lib/answering.js";
import { glyphs } from "../lib/glyphs.js";
import { number, size, t } from "../lib/i18n.js";
import { plainLine } from "../lib/records.js";
import { modelOf, roomOf } from "../lib/request.js";

/** Milliseconds without typing after which the prompt is measured. */
const MEASURE_MS = 400;
/** Share of the context from which on the meter warns. */
const NEAR = 0.8;
/** Characters of a pasted text from which on it becomes a file. */
const LONG_PASTE = 2500;

/** Load the strip above the field. Without a connection it comes with the next message. */
function loadStrip() {
  import("./strip.js").catch(() => {});
}

class ChatComposer extends PageElement {
  static properties = { tick: { state: true }, faults: { state: true }, dragging: { state: true }, meter: { state: true } };

  constructor() {
    super();
    this.tick = 0;
    /** Why files were not taken. @type {string[]} */
    this.faults = [];
    this.dragging = false;
    /** @type {{count: number, limit: number} | null} */
    this.meter = null;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this._timer = undefined;
    /** @type {AbortController | null} */
    this._measuring = null;
    /** When the refusal ends, by the error. @type {WeakMap<object, number>} */
    this._ends = new WeakMap();
    /** Id of the conversation that was shown last. @type {string | undefined} */
    this._id = undefined;
    this._isSending = false;
    this.hears(chats, "change");
    this.hears(server, "change");
  }

  get draft() {
    return chats.draft;
  }

  /** The draft has changed. */
  _kept() {
    const { text, files } = this.draft;
    chats.keepDraft(chats.current?.id ?? "", text, files);
    this.requestUpdate();
    this._measureSoon();
  }

  get isBusy() {
    return Boolean(chats.current && chats.isBusy(chats.current.id));
  }

  render() {
    const { draft, isBusy } = this;
    return html`<seat-strip></seat-strip><div class="composer ${this.dragging ? "dragging" : ""}" @dragover=${this._over}
        @dragleave=${() => { this.dragging = false; }} @drop=${this._drop}>
      ${this._error()}
      ${this._full()}
      ${this.faults.map((fault) => html`<p class="fault small" role="alert">${fault}
        <button class="icon" aria-label=${t("act.dismiss")} @click=${() => { this.faults = []; }}>${glyphs.close()}</button></p>`)}
      ${draft.files.length ? html`<ul class="files" aria-label=${t("files.label")}>${draft.files.map((file, i) => html`<li class="chip">
        <span class="clip" dir="auto">${plainLine(file.name)}</span> <span class="quiet">${size(file.size)}</span>
        <button class="icon" aria-label=${t("files.remove", { name: plainLine(file.name) })}
          @click=${() => { draft.files.splice(i, 1); this._kept(); }}>${glyphs.close()}</button></li>`)}</ul>` : nothing}
      <textarea rows="1" dir="auto" aria-label=${t("composer.label")} placeholder=${t("composer.placeholder")} .value=${live(draft.text)}
        @input=${this._typed} @keydown=${this._key} @paste=${this._paste}></textarea>
      <div class="row acts">
        <input type="file" multiple hidden @change=${this._picked}>
        <button class="icon" aria-label=${t("files.add")} title=${t("files.add")}
          @click=${() => /** @type {HTMLElement} */ (this.querySelector("input[type=file]")).click()}>${glyphs.file()}</button>
        ${this._answers()}
        ${this._meter()}
        <span class="grow"></span>
        ${isBusy
          ? html`<button class="main stop" aria-label=${t("act.stop")} title=${t("act.stop")} @click=${() => chats.stopAll()}>${glyphs.stop()} ${t("act.stop")}</button>`
          : html`<button class="main send" aria-label=${t("act.send")} title=${t("act.send")} ?disabled=${!this._canSend()} @click=${this._send}>${glyphs.send()}</button>`}
      </div>
    </div>`;
  }

  updated() {
    if (chats.running.size && !customElements.get("seat-strip")) loadStrip();
    const field = /** @type {HTMLTextAreaElement} */ (this.querySelector("textarea"));
    field.style.height = "auto";
    field.style.height = `${Math.min(field.scrollHeight + 2, innerHeight * 0.4)}px`;
    const id = chats.current?.id;
    if (id !== this._id) {
      this._id = id;
      this.meter = null;
      this._measureSoon();
    }
  }

  _canSend() {
    return this._isReady() && !this._isTooLong();
  }

  /** Whether there is something to send and somebody to send it to, whatever its length. */
  _isReady() {
    const { text, files } = this.draft;
    return Boolean((text.trim() || files.length) && server.current && !this._wait());
  }

  _isNear() {
    return Boolean(this.meter && this.meter.count >= NEAR * this.meter.limit);
  }

  /** Seconds until another try may succeed. */
  _wait() {
    const error = chats.errors.get(chats.current?.id ?? "");
    if (!error?.retryAfter) return 0;
    if (!this._ends.has(error)) this._ends.set(error, Date.now() + 1000 * error.retryAfter);
    return Math.max(0, Math.ceil((/** @type {number} */ (this._ends.get(error)) - Date.now()) / 1000));
  }

  _error() {
    const id = chats.current?.id ?? "";
    const error = chats.errors.get(id);
    if (!error) return nothing;
    const wait = this._wait();
    if (wait) setTimeout(() => { this.tick++; }, 250);
    return html`<div class="fault" role="alert">
      <p class="grow">${sentence(error)} ${wait ? html`<span aria-hidden="true">${t("error.wait", { n: wait })}</span>` : nothing}</p>
      ${error.kind === "key" ? html`<button class="plain" @click=${() => this.dispatchEvent(new CustomEvent("ask", { detail: "key", bubbles: true }))}>${t("key.enter")}</button>` : nothing}
      <button class="icon" aria-label=${t("act.dismiss")} @click=${() => { chats.errors.delete(id); chats.changed(); }}>${glyphs.close()}</button>
    </div>`;
  }

  _meter() {
    if (!this.meter) return nothing;
    const { count, limit } = this.meter;
    const state = this._isOver() ? "over" : count >= NEAR * limit ? "near" : "of";
    const colour = { over: "bad", near: "warn", of: "quiet" }[state];
    return html`<span class="meter small ${colour}" title=${t("meter.title")}>
      <progress max=${limit} value=${Math.min(count, limit)} aria-label=${t("meter.title")}></progress>
      <span class="clip">${t(`meter.${state}`, { count: number(count), limit: number(limit) })}</span></span>`;
  }

  /** Whether the prompt is longer than the model's context. */
  _isOver() {
    return Boolean(this.meter && this.meter.count >= this.meter.limit);
  }

  /** Whether the prompt must not be sent: it is too long, and nothing of it may be left out. */
  _isTooLong() {
    return this._isOver() && !chats.current?.forgets;
  }

  /** The ways on where the context is full. */
  _full() {
    const isRefused = chats.errors.get(chats.current?.id ?? "")?.code === "context_length_exceeded";
    if (!isRefused && !this._isTooLong()) return nothing;
    const hasMore = Boolean(chats.tree?.byId.size);
    const limit = this.meter?.limit ?? (chats.current && roomOf(modelOf(chats.current))) ?? "";
    return html`<div class="full row small" role="alert"><span class="grow">${t(hasMore ? "composer.full" : "composer.long", { limit })}</span>
      ${hasMore ? html`<button class="plain" @click=${async () => { await chats.forget(); await this._measure(); this._send(); }}>${t("act.forget")}</button>
      <button class="plain" ?disabled=${this.isBusy} @click=${() => chats.summarise().then(() => this._measureSoon())}>${t("act.summarise")}</button>` : nothing}</div>`;
  }

  /** How many answers are made at once. */
  _answers() {
    if (!chats.current || chats.current.session) return nothing;
    const { sampling } = chats.current;
    return html`<select class="answers small" aria-label=${t("composer.answers")} title=${t("composer.answers")} @change=${(/** @type {Event} */ event) => {
      const count = Number(/** @type {HTMLSelectElement} */ (event.target).value);
      if (count > 1) sampling.answers = count;
      else delete sampling.answers;
      void chats.keepSettings();
    }}>${NUM_ANSWERS.map((each) => html`<option value=${each} .selected=${live(each === (sampling.answers ?? 1))}>${t("composer.answers-n", { n: each })}</option>`)}</select>`;
  }

  /** @param {Event} event */
  _typed(event) {
    this.draft.text = /** @type {HTMLTextAreaElement} */ (event.target).value;
    loadStrip(); // so that it is there when the answer begins
    this._kept();
  }

  _measureSoon() {
    clearTimeout(this._timer);
    this._measuring?.abort();
    // With a key, each measurement counts against its limits.
    this._timer = setTimeout(() => void this._measure(), apiKey.value ? 4 * MEASURE_MS : MEASURE_MS);
  }

  async _measure() {
    const { text, files } = this.draft;
    if (!chats.tree || !server.current || chats.current?.session || this.isBusy || !(text || files.length || chats.tree.byId.size)) return;
    const own = this._measuring = new AbortController();
    try {
      this.meter = await chats.measure(text, files, own.signal);
    } catch {
      if (!own.signal.aborted) this.meter = null; // else a later measurement says it
    }
  }

  /** @param {KeyboardEvent} event */
  _key(event) {
    // Enter inside of an input method's composition chooses a word; 229 is its code in older browsers.
    if (event.isComposing || event.keyCode === 229) return;
    const field = /** @type {HTMLTextAreaElement} */ (event.target);
    const isTouch = matchMedia("(pointer: coarse)").matches;
    if (event.key === "Enter" && !event.shiftKey && !event.altKey && !isTouch) {
      event.preventDefault();
      void this._send();
    } else if (event.key === "ArrowUp" && !field.value) {
      const own = [...document.querySelectorAll("chat-message")].reverse()
        .find((each) => /** @type {any} */ (each).message?.role === "user");
      if (own) {
        event.preventDefault();
        /** @type {any} */ (own).edit();
      }
    }
  }

  async _send() {
    if (this._isSending) return;
    if (!chats.current || !server.isKnown) {
      // The page is still being opened, for somebody who is faster.
      const written = this.draft.text;
      this._isSending = true;
      await chats.opened;
      while (!server.isKnown) await new Promise((resolve) => server.addEventListener("change", resolve, { once: true }));
      this._isSending = false;
      if (written !== this.draft.text) return;
    }
    if (!this._isReady() || this.isBusy) return;
    const { text, files } = this.draft;
    if (text.length > LONG_PASTE || files.length || this._isNear()) {
      // What is longer than the context is not even sent. What was measured last may be another prompt.
      this._isSending = true;
      await this._measure();
      this._isSending = false;
      if (this._isTooLong() || text !== this.draft.text) return;
    }
    chats.dropDraft(chats.current?.id ?? "");
    this.faults = [];
    this.dispatchEvent(new Event("sent"));
    void chats.send(text, files).then(() => this._measureSoon());
    this.requestUpdate();
  }

  /** @param {DragEvent} event */
  _over(event) {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    this.dragging = true;
  }

  /** @param {DragEvent} event */
  _drop(event) {
    this.dragging = false;
    if (!event.dataTransfer?.files.length) return;
    event.preventDefault();
    void this._take([...event.dataTransfer.files]);
  }

  /** @param {ClipboardEvent} event */
  _paste(event) {
    const files = [...(event.clipboardData?.files ?? [])];
    const text = event.clipboardData?.getData("text/plain") ?? "";
    if (!files.length && text.length <= LONG_PASTE) return;
    event.preventDefault();
    if (files.length) {
      void this._take(files);
      return;
    }
    void this._takePasted(text);
  }

  /** @param {string} text */
  async _takePasted(text) {
    const { draft } = this;
    const { pastedFile } = await import("../lib/files.js");
    const { file, fault } = pastedFile(text, draft.files);
    if (file) draft.files.push(file);
    this.faults = fault ? [fault] : [];
    this._kept();
  }

  /** @param {Event} event */
  _picked(event) {
    const field = /** @type {HTMLInputElement} */ (event.target);
    void this._take([...(field.files ?? [])]);
    field.value = "";
  }

  /** @param {File[]} files */
  async _take(files) {
    const { draft } = this;
    const { readFiles } = await import("../lib/files.js");
    const { taken, faults } = await readFiles(files, draft.files.length);
    draft.files.push(...taken);
    this.faults = faults;
    this._kept();
  }
}

customElements.define("chat-composer", ChatComposer);
