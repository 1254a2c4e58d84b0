/** `Frames`: calls a function again and again while something moves on the screen, and keeps it cheap.
 *
 * Where the browser runs on the machine of the engine, a picture takes time from what it shows. So pictures get a share
 * of the machine's processors at most: each is measured, and what it costs sets the pause behind it. */

/** Whether this browser probably has the engine's processors. */
const isNear = /^(localhost$|127\.|\[::1\]$)/.test(location.hostname);
const cores = navigator.hardwareConcurrency || 2;

const CALM_MS = 1000;
/** Longest pause between two pictures, however dear they are, in milliseconds. Without a GPU and beside a busy engine one
 * takes 10 ms of both processors, since the engine's threads wait for each other. */
const MOST_MS = isNear ? 4000 : 1000;
/** What a picture costs in all, by what it costs on this thread: others raster, compose and show it. Measured in a
 * browser without a GPU. */
const IN_ALL = 1.5;
/** Pictures whose cost is remembered: the median of so many does not mind a pause of the machine. */
const NUM_COSTS = 5;

/** Time that pictures may take, by the time that passes: of a near engine's processors 0.4 %, which costs it twice that, else a
 * quarter of one. */
export const SHARE = isNear ? 0.004 * cores : 0.25;
/** How often what is shown is fetched, in milliseconds: each piece of a stream costs as much as a small picture. */
export const FETCH_MS = isNear ? (cores <= 4 ? 1000 : 500) : 100;

export class Frames {
  /** @param {() => void} draw @param {number} everyMs shortest pause between two calls; a second for readers who want less
   * motion. A timer waits it out: asking for every frame would wake the browser 60 times a second for nothing.
   * @param {number} [share] of the time, that the pictures may take */
  constructor(draw, everyMs, share = SHARE) {
    this._draw = draw;
    this._everyMs = everyMs;
    this._share = share;
    this._isOn = false;
    this._frame = 0;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this._timer = undefined;
    this._calm = matchMedia("(prefers-reduced-motion: reduce)");
    this._beganAt = 0;
    /** What the last pictures have cost, in milliseconds. @type {number[]} */
    this._costs = [];
    /** The turn of the loop behind a picture: then it is laid out, painted and handed on. */
    this._after = new MessageChannel();
    this._after.port1.onmessage = () => this._drawn();
  }

  /** Begin with the next frame. */
  start() {
    if (!this._isOn) this._await();
    this._isOn = true;
  }

  stop() {
    this._isOn = false;
    clearTimeout(this._timer);
    cancelAnimationFrame(this._frame);
  }

  /** Pause behind a picture, in milliseconds. */
  get pause() {
    const costs = this._costs.toSorted((a, b) => a - b);
    const cost = (costs[costs.length >> 1] ?? 0) * IN_ALL;
    return Math.max(this._calm.matches ? CALM_MS : this._everyMs, Math.min(MOST_MS, cost / this._share - cost));
  }

  /** No frame comes while the page is hidden. */
  _await() {
    this._frame = requestAnimationFrame(() => {
      this._beganAt = performance.now();
      this._draw();
      this._after.port2.postMessage(null);
    });
  }

  _drawn() {
    this._costs.push(performance.now() - this._beganAt);
    if (this._costs.length > NUM_COSTS) this._costs.shift();
    clearTimeout(this._timer);
    if (this._isOn) this._timer = setTimeout(() => this._await(), this.pause);
  }
}
