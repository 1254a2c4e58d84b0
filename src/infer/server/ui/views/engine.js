/** `<engine-view>`: what the engine does now and did in the last minutes, live or from a file. */

import { html, nothing } from "../vendor/core.js";
import { server } from "../lib/api.js";
import { chats } from "../lib/chats.js";
import { PageElement } from "../lib/element.js";
import { sentence } from "../lib/errors.js";
import { duration, learn, number, rate, t } from "../lib/i18n.js";
import en from "../lang/engine_en.js";
import zh from "../lang/engine_zh.js";
import { chartsOf } from "../engine/charts.js";
import { chartAt, chartsHeight, colours, drawCharts, drawLanes, isInSight, LABEL, laneAt, lanes } from "../engine/draw.js";
import { Frames } from "../engine/frames.js";
import { KEPT_MS } from "../engine/history.js";
import { live } from "../engine/live.js";
import { NUM_REQUESTS, load } from "../engine/load.js";
import { open, played, save } from "../engine/recording.js";
import { modelOf } from "../lib/request.js";
import "./comparison.js";
import "./engine_replicas.js";
import "./engine_table.js";

learn({ en, zh });
const SPANS = [5, 15, 30, 60, 300, 600];
/** Ten pictures a second at the most. */
const FRAME_MS = 90;
const stylesheet = "/ui/css/engine.css";

/** Say what a step of a replica was made of. @param {ReturnType<import("../engine/history.js").History["stepAt"]>} found @param {import("../engine/history.js").History} history
 * @param {string} replica */
export function stepText(found, history, replica) {
  if (!found) return replica ? t("engine.step-none", { replica }) : "";
  const { step } = found;
  const { pages } = history.replica(replica);
  return t(replica ? "engine.step-at" : "engine.step", {
    replica, number: number(step.number), took: duration(step.ms), n: step.sequences, prompt: step.prompt,
    used: number(pages ? pages - step.free : 0), cached: number(step.cached), steps: step.count,
  });
}

class EngineView extends PageElement {
  static properties = {
    span: { state: true }, isPaused: { state: true }, isTable: { state: true }, error: { state: true },
    compared: { state: true }, name: { state: true }, isLive: { state: true },
  };

  constructor() {
    super();
    this.span = 15;
    this.isPaused = false;
    this.isTable = false;
    this.isLive = true;
    this.error = "";
    /** Name of the file that is shown. */
    this.name = "";
    /** Recordings that are compared. @type {import("../engine/recording.js").Recording[]} */
    this.compared = [];
    /** What a file has. @type {import("../engine/history.js").History | null} */
    this._played = null;
    /** Right end of the picture where it does not follow the stream, in the stream's milliseconds. */
    this.end = 0;
    /** @type {number | null} */
    this.cursor = null;
    /** Name of the replica whose step is told. */
    this.replica = "";
    this._frames = new Frames(() => this._draw(), FRAME_MS);
    this.hears(server, "change");
    this.hears(live, "change");
    this.hears(load, "change");
    if (!document.querySelector(`link[href="${stylesheet}"]`)) {
      const link = document.createElement("link");
      link.rel = "stylesheet";
      link.href = stylesheet;
      document.head.append(link);
    }
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
    if (this.isLive) live.open(this._model());
  }

  /** The model whose engine is shown; "" where there is only one. */
  _model() {
    return server.models.length > 1 && chats.current ? modelOf(chats.current) : "";
  }

  get history() {
    return this.isLive ? live.history : this._played;
  }

  /** Why there is no picture, or why it does not go on. */
  _fault() {
    if (this.error) return this.error;
    if (!this.isLive) return "";
    if (load.error) return sentence(load.error);
    return live.error ? sentence(live.error) : live.reason && t(`engine.end.${live.reason}`);
  }

  /** Right end of the picture, in the stream's milliseconds. */
  get _until() {
    if (!this.history) return 0;
    if (this.isPaused || !this.isLive) return this.end;
    return live.shown;
  }

  /** The time that is shown; nothing before the first frame. */
  get _shown() {
    const length = 1000 * this.span;
    const to = Math.max(this._until, (this.history?.start ?? 0) + length);
    return { from: to - length, to };
  }

  _draw() {
    const { history } = this;
    const canvas = /** @type {HTMLCanvasElement | null} */ (this.querySelector("canvas.lanes"));
    const below = /** @type {HTMLCanvasElement | null} */ (this.querySelector("canvas.charts"));
    if (!history || !canvas || !below || !canvas.clientWidth) return;
    const { from, to } = this._shown;
    const view = { from, to, until: Math.min(this._until, history.now), cursor: this.cursor };
    const c = colours(this);
    const layout = lanes(history);
    if (canvas.height !== Math.round(layout.height * devicePixelRatio)) canvas.setAttribute("height", String(layout.height));
    if (!history.replicas.has(this.replica)) [this.replica] = history.replicas.keys();
    const under = this.cursor === null ? null : this._barAt(this.cursor);
    if (isInSight(canvas)) drawLanes(canvas, history, view, c, { seats: t("engine.seat"), queue: t("engine.queue"), selected: under });
    if (isInSight(below)) drawCharts(below, chartsOf(history, view, c), view, c);
    this._say(view);
  }

  /** The numbers that change often are written past lit, once for each picture.
   * @param {{until: number}} view */
  _say(view) {
    const history = /** @type {import("../engine/history.js").History} */ (this.history);
    const { gauges, hello } = history;
    const from = view.until - 10_000;
    const used = gauges.pages ? 1 - gauges.free_pages / gauges.pages : 0;
    /** @type {Record<string, string>} */
    const values = {
      running: `${number(gauges.running ?? 0)} / ${number(hello.seats)}`,
      waiting: number((gauges.waiting ?? 0) + (gauges.preempted ?? 0)),
      pages: number(used, { style: "percent", maximumFractionDigits: 0 }),
      speed: rate(history.rate(Math.max(from, history.start), view.until)),
      step: history.number ? number(history.number) : "–",
    };
    for (const [name, text] of Object.entries(values)) {
      const element = this.querySelector(`[data-number="${name}"]`);
      if (element && element.textContent !== text) element.textContent = text;
    }
    const line = this.querySelector(".engine-step");
    const text = this.cursor === null ? t(history.hasReplicas ? "engine.hover-replicas" : "engine.hover")
      : stepText(history.stepAt(this.cursor, this.replica), history, this.replica);
    if (line && line.textContent !== text) line.textContent = text;
  }

  /** The request whose decoding or prompt is under the pointer. @param {number} time */
  _barAt(time) {
    const there = this._lane;
    if (there === null || !this.history) return null;
    for (const bar of this.history.bars(time, time)) {
      const span = bar.spans.find((each) => each.lane === there.lane && (there.lane < 0 || each.replica === there.replica) && each.from <= time && (each.to ?? Infinity) >= time);
      if (span) return bar.number;
    }
    return null;
  }

  /** @type {{replica: string, lane: number} | null} */
  _lane = null;

  /** @param {PointerEvent} event */
  _point(event) {
    const canvas = /** @type {HTMLCanvasElement} */ (event.currentTarget);
    const box = canvas.getBoundingClientRect();
    const share = (event.clientX - box.left - LABEL) / (box.width - LABEL);
    if (!this.history || share < 0) {
      this.cursor = null;
      return;
    }
    const { from, to } = this._shown;
    this.cursor = from + share * (to - from);
    const y = event.clientY - box.top;
    this._lane = canvas.classList.contains("lanes") ? laneAt(lanes(this.history), y) : null;
    this.replica = this._lane?.replica
      ?? chartAt(chartsOf(this.history, { from, to, until: to, cursor: null }, colours(this)), y)?.name ?? this.replica;
    this._draw();
  }

  /** @param {KeyboardEvent} event */
  _key(event) {
    const { history } = this;
    if (!history) return;
    const names = [...history.replicas.keys()];
    const isAcross = names.length > 1 && ["ArrowUp", "ArrowDown"].includes(event.key);
    if (!isAcross && !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    event.preventDefault();
    this._pause(true);
    const way = ["ArrowLeft", "ArrowUp"].includes(event.key) ? -1 : 1;
    if (isAcross) this.replica = names[(names.indexOf(this.replica) + way + names.length) % names.length];
    const { at } = history.replica(this.replica).steps;
    const found = history.stepAt(this.cursor ?? this.end, this.replica);
    const moves = isAcross || this.cursor === null ? 0 : way;
    const index = Math.max(0, Math.min(at.length - 1, (found?.index ?? 0) + moves));
    this.cursor = at[index] ?? null;
    if (this.cursor !== null) this.end = Math.max(Math.min(this.end, this.cursor + 1000 * this.span), this.cursor);
    this._draw();
  }

  /** @param {boolean} isPaused */
  _pause(isPaused) {
    if (isPaused && !this.isPaused) this.end = this._until;
    this.isPaused = isPaused;
    if (!isPaused) this.cursor = null;
  }

  /** @param {Event} event */
  _scrub(event) {
    if (!this.history) return;
    const value = Number(/** @type {HTMLInputElement} */ (event.target).value);
    this._pause(true);
    this.end = this.history.now + 1000 * value;
    this._draw();
  }

  /** @param {Event} event */
  async _open(event) {
    const input = /** @type {HTMLInputElement} */ (event.target);
    const file = input.files?.[0];
    input.value = "";
    if (!file) return;
    try {
      const recordings = await open(file);
      this.error = "";
      if (recordings.length > 1) this.compared = recordings;
      else {
        this.isLive = false;
        this.isPaused = true;
        this.name = file.name;
        const history = played(recordings[0]);
        this._played = history;
        this.end = history.now;
        this.span = SPANS.find((each) => each * 1000 >= history.now - history.start) ?? SPANS[5];
      }
    } catch (error) {
      this.error = t(error instanceof Error && error.message === "large" ? "engine.file-large" : "engine.file-wrong");
    }
  }

  _live() {
    this.isLive = true;
    this.name = "";
    this.compared = [];
    this.isPaused = false;
  }

  render() {
    const { history } = this;
    const fault = this._fault();
    return html`<div class="engine">
      ${fault ? html`<p class="notice bad" role="alert">${fault}</p>` : nothing}
      ${this._controls()}
      ${this.isLive ? this._load() : nothing}
      ${history ? this._picture() : fault ? nothing : html`<p class="quiet">${t("engine.connecting")}</p>`}
      <comparison-view .recordings=${this.compared}></comparison-view>
    </div>`;
  }

  _controls() {
    const past = this.history ? Math.max(1, Math.min(KEPT_MS, this.history.now - this.history.start) / 1000) : 1;
    return html`<div class="row engine-controls">
      ${this.isLive ? html`<button aria-pressed=${this.isPaused} @click=${() => this._pause(!this.isPaused)}>
          ${t(this.isPaused ? "engine.go-on" : "engine.pause")}</button>`
        : html`<strong class="clip" dir="auto">${this.name}</strong><button @click=${this._live}>${t("engine.live")}</button>`}
      <label class="row small">${t("engine.span")}
        <select @change=${(/** @type {Event} */ event) => { this.span = Number(/** @type {HTMLSelectElement} */ (event.target).value); }}>
          ${SPANS.map((each) => html`<option value=${each} ?selected=${each === this.span}>${duration(1000 * each)}</option>`)}
        </select></label>
      <label class="row small grow">${t("engine.scrub")}
        <input class="grow" type="range" min=${-past} max="0" step="0.05" .value=${String(this.isPaused && this.history ? (this.end - this.history.now) / 1000 : 0)}
          @input=${this._scrub}></label>
      <label class="row small"><input type="checkbox" ?checked=${this.isTable}
        @change=${(/** @type {Event} */ event) => { this.isTable = /** @type {HTMLInputElement} */ (event.target).checked; }}>${t("engine.table")}</label>
      <button ?disabled=${!live.keeper} @click=${() => live.keeper && save(live.keeper.recording(), "infer-steps.json")}>${t("engine.save")}</button>
      <label class="button">${t("engine.open")}<input class="unseen" type="file" accept="application/json,.json" @change=${this._open}></label>
    </div>`;
  }

  /** What a reader can do to see the batch at work. */
  _load() {
    const compare = () => {
      const view = /** @type {any} */ (this.querySelector("comparison-view"));
      view.scrollIntoView({ block: "start" });
      void view.run();
    };
    return html`<div class="row">
      ${load.numOpen
        ? html`<button @click=${() => load.stop()}>${t("compare.stop")}</button><span class="quiet small" role="status">${t("engine.load-open", { n: load.numOpen })}</span>`
        : html`<button class="plain load" ?disabled=${!server.current} @click=${() => load.run(this._model() || (server.current?.id ?? ""))}>${t("engine.load", { n: NUM_REQUESTS })}</button>`}
      <button class="plain" @click=${compare}>${t("compare.run")}</button>
      <span class="quiet small">${t("engine.load-hint")}</span>
    </div>`;
  }

  _picture() {
    const history = /** @type {import("../engine/history.js").History} */ (this.history);
    const names = ["running", "waiting", "pages", "speed", "step"];
    const kinds = ["waiting", "prompt", "cached", "chunk", "decode", "preempted", ...(history.hasReplicas ? ["absent"] : [])];
    const charts = chartsOf(history, { from: 0, to: 1, until: 1, cursor: null }, colours(this));
    return html`
      <dl class="engine-numbers">${names.map((name) => html`<div><dt>${t(`engine.number.${name}`)}</dt><dd data-number=${name}>–</dd></div>`)}</dl>
      <engine-replicas .history=${history}></engine-replicas>
      <p class="legend engine-legend">${kinds.map((kind) => html`<span class=${`kind-${kind}`}>${t(`engine.kind.${kind}`)}</span>`)}</p>
      <div class="engine-picture" tabindex="0" role="group" aria-label=${t("engine.picture")} @keydown=${this._key}>
        <canvas class="lanes" height="120" role="img" aria-label=${t("engine.lanes-label")}
          @pointermove=${this._point} @pointerleave=${() => { this.cursor = null; }} @click=${() => this._pause(true)}></canvas>
        <canvas class="charts" height=${chartsHeight(charts)} role="img" aria-label=${t("engine.charts-label")}
          @pointermove=${this._point} @pointerleave=${() => { this.cursor = null; }}></canvas>
      </div>
      <p class="engine-step small quiet" aria-live=${this.isPaused ? "polite" : "off"}></p>
      ${this.isTable ? html`<engine-table .history=${history} .until=${() => this._until}></engine-table>` : nothing}`;
  }
}

customElements.define("engine-view", EngineView);
