/** `<chat-view>`: the open conversation and the field for the next message. */

import { html, nothing, repeat } from "../vendor/core.js";
import { server } from "../lib/api.js";
import { chats } from "../lib/chats.js";
import { PageElement } from "../lib/element.js";
import { t } from "../lib/i18n.js";
import { speech } from "../lib/speech.js";
import { storage } from "../lib/storage.js";
import { go, place } from "../routes.js";
import "./composer.js";
import "./message.js";

/** How near to its end, in pixels, a view follows an answer. */
const NEAR = 80;
/** Most messages that are shown at once; older ones are shown on a click. */
const MAX_SHOWN = 60;

class ChatView extends PageElement {
  static properties = { numMore: { state: true } };

  constructor() {
    super();
    this.numMore = 0;
    this._follows = true;
    this._shownId = "";
    this._wasBusy = false;
    this.hears(chats, "change");
    this.hears(server, "change");
    this.hears(storage, "problem");
    this.addEventListener("grown", () => this._follow());
    chats.addEventListener("change", () => this._track());
    chats.addEventListener("ended", (event) => {
      const message = /** @type {CustomEvent<import("../lib/records.js").Message>} */ (event).detail;
      if (message.conversation === chats.current?.id) speech.say(t(`said.${message.finish ?? ""}`, {}).startsWith("said.") ? t("said.done") : t(`said.${message.finish ?? ""}`));
    });
  }

  /** Say that an answer begins, and let the address name the conversation. */
  _track() {
    const now = chats.current;
    if (!now) return;
    const isBusy = chats.isBusy(now.id);
    if (isBusy && !this._wasBusy) speech.say(t("said.answering"));
    this._wasBusy = isBusy;
    if (place().view.name === "chat" && chats.all.has(now.id) && place().id !== now.id && !place().id) {
      history.replaceState(null, "", `#/chat/${encodeURIComponent(now.id)}`);
    }
  }

  _follow() {
    const view = this.querySelector(".view");
    if (view && this._follows) view.scrollTop = view.scrollHeight;
  }

  updated() {
    const id = chats.current?.id ?? "";
    if (id !== this._shownId) {
      this._shownId = id;
      this._follows = true;
      this.numMore = 0;
    }
    this._follow();
  }

  render() {
    const path = chats.tree?.path() ?? [];
    const numHidden = Math.max(0, path.length - MAX_SHOWN - this.numMore);
    return html`
      <main class="view" id="view" tabindex="-1" @scroll=${this._scrolled} aria-label=${t("chat.label")}>
        <div class="messages">
          ${this._notices()}
          ${numHidden ? html`<button class="plain" @click=${() => { this.numMore += MAX_SHOWN; this._follows = false; }}>${t("chat.earlier", { n: numHidden })}</button>` : nothing}
          ${repeat(path.slice(numHidden), (each) => each.id, (each) => html`<chat-message .message=${each}></chat-message>`)}
          ${path.length || !chats.isLoaded ? nothing : this._welcome()}
        </div>
      </main>
      <chat-composer class="composer-space" @sent=${() => { this._follows = true; }}></chat-composer>
    `;
  }

  _scrolled() {
    const view = /** @type {HTMLElement} */ (this.querySelector(".view"));
    this._follows = view.scrollHeight - view.scrollTop - view.clientHeight < NEAR;
  }

  _notices() {
    const notices = [];
    if (storage.problem) notices.push(html`<p class="notice bad">${t(`storage.${storage.problem}`)}</p>`);
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
    return html`<div class="welcome">
      <h2>${t("chat.welcome", { model: current.id })}</h2>
      <p class="quiet">${t("chat.begin")}</p>
      <div class="row examples">
        ${["example.story", "example.sum", "example.fox"].map((key) => html`<button class="plain"
          @click=${() => { go("chat"); void chats.send(t(key), []); }}>${t(key)}</button>`)}
      </div>
    </div>`;
  }
}

customElements.define("chat-view", ChatView);
