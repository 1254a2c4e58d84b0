/** `<chat-view>`: the open conversation and the field for the next message. */

import { html, nothing, repeat } from "../vendor/core.js";
import { server } from "../lib/api.js";
import { chats } from "../lib/chats.js";
import { PageElement } from "../lib/element.js";
import { t } from "../lib/i18n.js";
import { storage } from "../lib/storage.js";
import { go } from "../routes.js";
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
    this._top = 0;
    this._shownId = "";
    this.hears(chats, "change");
    this.hears(server, "change");
    this.hears(storage, "problem");
    this._sizes = new ResizeObserver(() => this._follow());
  }

  firstUpdated() {
    this._sizes.observe(/** @type {Element} */ (this.querySelector(".messages")));
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    this._sizes.disconnect();
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
    // The event of our own scrolling may come after the answer has grown again: only somebody who
    // scrolls back wants to stay there.
    if (view.scrollHeight - view.scrollTop - view.clientHeight < NEAR) this._follows = true;
    else if (view.scrollTop < this._top - 1) this._follows = false;
    this._top = view.scrollTop;
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
