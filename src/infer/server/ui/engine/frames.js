/** `Frames`: calls a function again and again while something moves on the screen. */

const CALM_MS = 1000;

export class Frames {
  /** @param {() => void} draw @param {number} everyMs shortest pause between two calls; a second for readers who want less
   * motion. A timer waits it out: asking for every frame would wake the browser 60 times a second for nothing. */
  constructor(draw, everyMs) {
    this._draw = draw;
    this._everyMs = everyMs;
    this._isOn = false;
    this._frame = 0;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this._timer = undefined;
    this._calm = matchMedia("(prefers-reduced-motion: reduce)");
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

  /** No frame comes while the page is hidden. */
  _await() {
    this._frame = requestAnimationFrame(() => {
      this._timer = setTimeout(() => this._await(), this._calm.matches ? CALM_MS : this._everyMs);
      this._draw();
    });
  }
}
