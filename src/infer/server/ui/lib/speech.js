/** `speech`: what the page's live region says. It says that an answer begins and that it is there,
 * and not every token. */

class Speech extends EventTarget {
  constructor() {
    super();
    this.text = "";
  }

  /** @param {string} text */
  say(text) {
    this.text = text;
    this.dispatchEvent(new Event("change"));
  }
}

export const speech = new Speech();
