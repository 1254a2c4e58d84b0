/** `<chat-view>`: the open conversation and the field for the next message. */

import { html, nothing, repeat } from "../vendor/core.js";
import { server } from "../lib/api.js";
import { chats } from "../lib/chats.js";
import { PageElement } from "../lib/element.js";
import { t } from "../lib/i18n.js";
import { glyphs } from "../lib/glyphs.js";
import { keepPlace, placeIn } from "../lib/local.js";
import { plainLine } from "../lib/records.js";
import { modelOf } from "../lib/request.js";
import { storage } from "../lib/storage.js";
import { go } from "../routes.js";
import "./composer.js";
import "./message.js";

/** @typedef {import("../lib/records.js").Message} Message */

/** Name of the model that ships, which can tell stories and do small sums. */
const SHIPPED = "infer-demo";
/** How near to its end, in pixels, a view follows an answer. */
const NEAR = 80;
/** Most messages that are shown at once; older ones are shown on a click. */
const MAX_SHOWN = 60;

/** How long after its opening, or after an answer, a view may still grow at its end, in milliseconds. */
const SETTLE_MS = 800;
/** Milliseconds without scrolling after which the place is remembered. */
const REMEMBER_MS = 200;

class ChatView extends PageElement {
  static properties = { numMore: { state: true }, isAway: { state: true } };

  constructor() {
    super();
    this.numMore = 0;
    /** Whether the end is so far away that a button leads to it. */
    this.isAway = false;
    this._follows = true;
    this._top = 0;
    this._shownId = "";
    /** Id of the running answer that was followed last. */
    this._running = "";
    /** Until when the view may grow without a running answer. */
    this._settles = 0;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this._remembering = undefined;
    this.hears(chats, "change");
    this.hears(server, "change");
    this.hears(storage, "problem");
    this._sizes = new ResizeObserver(() => this._follow());
  }

  firstUpdated() {
    for (const part of [".messages", ".view"]) this._sizes.observe(/** @type {Element} */ (this.querySelector(part)));
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    this._sizes.disconnect();
  }

  /** Stay at the end of an answer that grows; whatever else gets longer was opened by the reader. */
  _follow() {
    const view = this.querySelector(".view");
    if (!view) return;
    const grows = chats.current && chats.isBusy(chats.current.id);
    if (grows) this._settles = performance.now() + SETTLE_MS;
    if (this._follows && performance.now() < this._settles) view.scrollTop = view.scrollHeight;
    this._look();
  }

  _look() {
    const view = this.querySelector(".view");
    if (view) this.isAway = view.scrollHeight - view.scrollTop - view.clientHeight > 3 * NEAR;
  }

  updated() {
    const id = chats.current?.id ?? "";
    const last = chats.tree?.path().at(-1);
    if (id !== this._shownId && !chats.isOpening) {
      this._shownId = id;
      this._settles = performance.now() + SETTLE_MS;
      this._follows = !this._return(id);
      this.numMore = 0;
    } else if (last?.finish === "running" && last.id !== this._running) this._follows = true;
    if (last?.finish === "running") this._running = last.id;
    this._follow();
  }

  /** Go back to where the reader was in a conversation. @param {string} id @returns {boolean} whether that is known */
  _return(id) {
    const { first = "", top = 0 } = placeIn(id) ?? {};
    const there = [...this.querySelectorAll("chat-message")].find((each) => /** @type {any} */ (each).message?.id === first);
    const view = this.querySelector(".view");
    if (!there || !view) return false;
    const move = () => { view.scrollTop += there.getBoundingClientRect().top - view.getBoundingClientRect().top - top; };
    move();
    void Promise.all([...this.querySelectorAll("chat-message")].map((each) => /** @type {any} */ (each).updateComplete)).then(move);
    return true;
  }

  _remember() {
    const view = this.querySelector(".view");
    if (!view || !this._shownId) return;
    const edge = view.getBoundingClientRect().top;
    const first = [...this.querySelectorAll("chat-message")].find((each) => each.getBoundingClientRect().bottom > edge);
    const isAtEnd = view.scrollHeight - view.scrollTop - view.clientHeight < NEAR;
    keepPlace(this._shownId, isAtEnd || !first ? null : { first: /** @type {any} */ (first).message?.id, top: first.getBoundingClientRect().top - edge });
  }

  render() {
    const path = chats.tree?.path() ?? [];
    const numHidden = Math.max(0, path.length - MAX_SHOWN - this.numMore);
    const answered = path.findLast((each) => each.figures?.requestId);
    const memory = answered?.figures?.truncated ?? 0;
    return html`
      <main class="view" id="view" tabindex="-1" @scroll=${this._scrolled} aria-label=${t("chat.label")}>
        <div class="messages" @reading=${this._read} @click=${this._clicked}>
          ${this._notices()}
          ${numHidden ? html`<button class="plain earlier" @click=${this._earlier}>${t("chat.earlier", { n: numHidden })}</button>` : nothing}
          ${repeat(path.slice(numHidden), (each) => each.id, (each, i) => html`${memory && i + numHidden === memory ? html`<p class="memory">${t("chat.memory")}</p>` : nothing}${this._message(each)}`)}
          ${path.length || !chats.isLoaded ? nothing : this._welcome()}
        </div>
      </main>
      <div class="latest-space">${this.isAway ? html`<button class="plain latest" @click=${this._latest}>${glyphs.down()} ${t("chat.latest")}</button>` : nothing}</div>
      <chat-composer class="composer-space" @sent=${() => { this._follows = true; this._settles = performance.now() + SETTLE_MS; }}></chat-composer>
    `;
  }

  /** A message, or answers of which none was chosen yet, side by side. @param {Message} message */
  _message(message) {
    const siblings = message.together ? chats.tree?.children(message.parent).filter((each) => each.together === message.together) ?? [] : [];
    if (siblings.length < 2 || chats.tree?.children(message.id).length) return html`<chat-message .message=${message}></chat-message>`;
    return html`<section class="together" aria-label=${t("chat.together", { n: siblings.length })}>
      <p class="quiet small">${t("chat.together", { n: siblings.length })}</p>
      <div class="columns">${siblings.map((each) => html`<div class="column"><chat-message .message=${each}></chat-message>
        ${each.finish === "running" ? nothing : html`<button class="plain choose" @click=${() => chats.choose(each)}>${t("act.choose-answer")}</button>`}</div>`)}</div>
    </section>`;
  }

  /** The reader looks at something: the view stays where it is. */
  _read() {
    this._follows = false;
    this._settles = 0;
  }

  /** @param {Event} event */
  _clicked(event) {
    if (/** @type {Element} */ (event.target).closest("summary, [aria-expanded]")) this._read();
  }

  /** Show older messages above those that are there, which stay where they are. */
  async _earlier() {
    const view = /** @type {Element} */ (this.querySelector(".view"));
    const first = /** @type {Element} */ (this.querySelector("chat-message"));
    const before = first.getBoundingClientRect().top;
    this._read();
    this.numMore += MAX_SHOWN;
    await this.updateComplete;
    await Promise.all([...this.querySelectorAll("chat-message")].map((each) => /** @type {any} */ (each).updateComplete));
    view.scrollTop += first.getBoundingClientRect().top - before;
  }

  _latest() {
    const view = /** @type {Element} */ (this.querySelector(".view"));
    this._follows = true;
    this._settles = performance.now() + SETTLE_MS;
    view.scrollTop = view.scrollHeight;
    /** @type {HTMLElement | null} */ (this.querySelector(".composer textarea"))?.focus({ preventScroll: true });
  }

  _scrolled() {
    const view = /** @type {HTMLElement} */ (this.querySelector(".view"));
    // The event of our own scrolling may come after the answer has grown again: only somebody who
    // scrolls back wants to stay there.
    if (view.scrollHeight - view.scrollTop - view.clientHeight < NEAR) this._follows = true;
    else if (view.scrollTop < this._top - 1) this._follows = false;
    this._top = view.scrollTop;
    this._look();
    clearTimeout(this._remembering);
    this._remembering = setTimeout(() => this._remember(), REMEMBER_MS);
  }

  _notices() {
    const notices = [];
    if (storage.problem) notices.push(html`<p class="notice bad">${t(`storage.${storage.problem}`)}</p>`);
    const chosen = server.models.find((each) => chats.current && each.id === modelOf(chats.current));
    if (chosen?.status === "failed") notices.push(html`<p class="notice bad">${t("model.why", { model: chosen.id, reason: plainLine(chosen.reason ?? "").slice(0, 300) })}</p>`);
    if (storage.damaged.length) notices.push(html`<p class="notice">${t("storage.damaged", { n: storage.damaged.length, ids: storage.damaged.slice(0, 5).join(", ") })}</p>`);
    return notices;
  }

  _welcome() {
    const { error, isKnown, current } = server;
    if (error?.kind === "key") {
      return html`<div class="welcome"><h2>${t("key.needed")}</h2><p class="quiet">${t("key.why")}</p>
        <button class="main" @click=${() => this.dispatchEvent(new CustomEvent("ask", { detail: "key", bubbles: true }))}>${t("key.enter")}</button></div>`;
    }
    if (error) return html`<div class="welcome"><h2>${t("server.away")}</h2><p class="quiet">${t("server.waits")}</p></div>`;
    if (!isKnown || !current) return nothing;
    const name = chats.current ? modelOf(chats.current) : current.id;
    const examples = name === SHIPPED ? ["story", "fox", "sum"] : ["explain", "write", "plan"];
    return html`<div class="welcome">
      <h2>${t("chat.welcome", { model: name })}</h2>
      <p class="quiet">${t("chat.begin")}</p>
      <div class="row examples">
        ${examples.map((each) => html`<button class="plain"
          @click=${() => { go("chat"); void chats.send(t(`example.${each}`), []); }}>${t(`example.${each}`)}</button>`)}
      </div>
    </div>`;
  }
}

customElements.define("chat-view", ChatView);
