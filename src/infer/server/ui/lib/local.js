/** Small choices of the reader in `localStorage`. Where it is forbidden they last as long as the page. */

const PREFIX = "infer.";
/** @type {Map<string, unknown>} */
const kept = new Map();

/** @template T @param {string} name @param {T} otherwise @returns {T} */
export function recall(name, otherwise) {
  if (kept.has(name)) return /** @type {T} */ (kept.get(name));
  try {
    const text = localStorage.getItem(PREFIX + name);
    const value = text === null ? otherwise : JSON.parse(text);
    return typeof value === typeof otherwise || otherwise === null ? value : otherwise;
  } catch {
    return otherwise;
  }
}

/** @param {string} name @param {unknown} value */
export function keep(name, value) {
  kept.set(name, value);
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // The choice lasts as long as the page.
  }
}

/** Where a reader was in a conversation, as long as the tab is open. @typedef {{first: string, top: number}} Place */

/** @param {string} id @returns {Place | null} */
export function placeIn(id) {
  try {
    const found = JSON.parse(sessionStorage.getItem(`${PREFIX}place.${id}`) ?? "null");
    return typeof found?.first === "string" && Number.isFinite(found.top) ? found : null;
  } catch {
    return null;
  }
}

/** @param {string} id @param {Place | null} place null: at the end */
export function keepPlace(id, place) {
  try {
    if (place) sessionStorage.setItem(`${PREFIX}place.${id}`, JSON.stringify(place));
    else sessionStorage.removeItem(`${PREFIX}place.${id}`);
  } catch {
    // The end is shown next time.
  }
}
