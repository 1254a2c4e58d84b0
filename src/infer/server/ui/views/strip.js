/** `<seat-strip>`: the engine's slots during the last seconds, above the field while something is answered. The reader's
 * own requests have the colour, those of others are grey; a click opens the engine view. */

import { html, nothing } from "../vendor/core.js";
import { chats } from "../lib/chats.js";
import { PageElement } from "../lib/element.js";
import { made } from "../lib/generation.js";
import { rate, t } from "../lib/i18n.js";
import { modelOf } from "../lib/request.js";
import { server } from "../lib/api.js";
import { fit } from "../engine/draw.js";
import { Frames } from "../engine/frames.js";
import { live } from "../engine/live.js";
import { go } from "../routes.js";

/** The time that is shown, in milliseconds. */
const SHOWN_MS = 12_000;
/** How long the strip stays after the last answer, in milliseconds. */
const LINGER_MS = 4000;
const [HEIGHT, FRAME_MS, WORDS_MS] = [26, 90, 500];
/** Fewest and most lanes: a few are always there, and many share a pixel. */
const [FEWEST, MOST] = [4, 26];

class SeatStrip extends PageElement {
  static properties = { isShown: { state: true }, said: { state: true } };

  constructor() {
    super();
    this.isShown = false;
    this.said = "";
    this._busyAt = 0;
    this._numTraces = 0;
    this._worded = 0;
    this._frames = new Frames(() => this._show(), FRAME_MS);
    chats.addEventListener("change", () => this._fill());
    this._fill();
    this.hears(chats, "change");
    this.hears(live, "change");
  }

  connectedCallback() {
    super.connectedCallback();
    this._frames.start();
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    this._frames.stop();
  }

  updated() {
    this._draw(); // a canvas that has just appeared is empty
    if (this._busyAt) live.open(server.models.length > 1 && chats.current ? modelOf(chats.current) : "");
  }

  /** An answer may have been over before the stream began, or before this module was there. */
  _fill() {
    if (chats.running.size || chats.traces.length > this._numTraces) this._busyAt = performance.now();
    this._numTraces = chats.traces.length;
    if (this.isConnected && this._busyAt) this._frames.start();
    for (const [trace, startedAt] of chats.traces) live.fill(trace, startedAt);
  }

  /** Draw as long as something is answered, and a little longer. */
  _show() {
    const now = performance.now();
    if (chats.running.size) this._busyAt = now;
    const isRecent = this._busyAt > 0 && now - this._busyAt < LINGER_MS;
    this.isShown = Boolean(live.history) && isRecent;
    if (!isRecent) {
      this._frames.stop();
      return;
    }
    this._draw();
    if (!live.history || now - this._worded < WORDS_MS) return;
    this._worded = now;
    this._say();
  }

  _draw() {
    const canvas = this.querySelector("canvas");
    const { history } = live;
    if (!history || !canvas?.clientWidth) return;
    const until = live.shown;
    const from = until - SHOWN_MS;
    const [own, others] = [getComputedStyle(canvas).color, getComputedStyle(this).color];
    const { context, width } = fit(canvas, HEIGHT);
    const tops = new Map();
    let lanes = 0;
    for (const [name, replica] of history.replicas) {
      tops.set(name, lanes);
      lanes += Math.min(history.hello.seats, Math.max(FEWEST, replica.maxLane + 1));
    }
    const high = HEIGHT / Math.min(MOST, lanes);
    context.fillStyle = others;
    context.globalAlpha = 0.25;
    for (let lane = 0; lane < Math.min(MOST, lanes); lane++) context.fillRect(0, (lane + 1) * high - 1, width, 0.5);
    for (const bar of history.bars(from, until)) {
      context.fillStyle = made.has(bar.name ?? "") ? own : others;
      for (const span of bar.spans) {
        const to = Math.min(span.to ?? until, until);
        if (span.lane < 0 || to < from || span.from > until) continue;
        const left = ((Math.max(span.from, from) - from) / SHOWN_MS) * width;
        const lane = ((tops.get(span.replica) ?? 0) + span.lane) % MOST;
        context.globalAlpha = span.kind === "decode" ? 1 : span.kind === "prompt" ? 0.35 : 0.6;
        context.fillRect(left, lane * high, Math.max(1, ((to - from) / SHOWN_MS) * width - left), Math.max(1, high - 1));
      }
    }
    context.globalAlpha = 1;
  }

  /** What the strip shows, in words. */
  _say() {
    const { history } = live;
    if (!history) return;
    let [running, own, waiting] = [0, 0, 0];
    for (const bar of history.open.values()) {
      if (bar.state !== "running") waiting += 1;
      else {
        running += 1;
        if (made.has(bar.name ?? "")) own += 1;
      }
    }
    const seats = history.hello.seats * history.replicas.size;
    const parts = [t("strip.slots", { running, seats })];
    if (running > own && own) parts.push(t("strip.own", { n: own }));
    if (waiting) parts.push(t("strip.waiting", { n: waiting }));
    const speed = history.rate(Math.max(history.now - 3000, history.start), history.now);
    if (speed) parts.push(t("happened.rate", { rate: rate(speed) }));
    this.said = parts.join(" · ");
  }

  render() {
    if (!this.isShown) return nothing;
    return html`<button class="strip" title=${t("strip.open")} @click=${() => go("engine")}>
      <canvas height=${HEIGHT} aria-hidden="true"></canvas>
      <span class="small quiet clip">${this.said}</span><span class="unseen">${t("strip.open")}</span></button>`;
  }
}

customElements.define("seat-strip", SeatStrip);
