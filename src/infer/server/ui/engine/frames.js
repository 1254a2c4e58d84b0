/** `Frames`: calls a function again and again while something moves on the screen. */

const CALM_MS = 1000;

export class Frames {
  /** @param {() => void} draw @param {number} everyMs pause between two calls; a second for readers who want less motion */
  constructor(draw, everyMs) {
    this._draw = draw;
    this._everyMs = everyMs;
    this._drawnAt = 0;
    this._frame = 0;
    this._calm = matchMedia("(prefers-reduced-motion: reduce)");
  }

  /** Begin with the next frame. */
  start() {
    this._frame ||= requestAnimationFrame(() => this._tick());
  }

  stop() {
    cancelAnimationFrame(this._frame);
    this._frame = this._drawnAt = 0;
  }

  _tick() {
    this._frame = requestAnimationFrame(() => this._tick());
    const now = performance.now();
    if (document.hidden || now - this._drawnAt < (this._calm.matches ? CALM_MS : this._everyMs)) return;
    this._drawnAt = now;
    this._draw();
  }
}
