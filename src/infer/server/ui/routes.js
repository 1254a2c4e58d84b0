/** The views of the page: `#/NAME` and, for some, `#/NAME/ID`. To add one, define its element in a
 * module of its own and add a row here; the module is loaded when the view is first opened. */

/** @typedef {{name: string, title: string, tag: string, load: () => Promise<unknown>}} View */

/** @type {View[]} */
export const VIEWS = [
  { name: "chat", title: "view.chat", tag: "chat-view", load: () => import("./views/chat.js") },
  { name: "text", title: "view.text", tag: "raw-view", load: () => import("./views/raw.js") },
  { name: "engine", title: "view.engine", tag: "engine-view", load: () => import("./views/engine.js") },
];

/** The view and the id that the address names. */
export function place() {
  const [name = "", id = ""] = location.hash.replace(/^#\/?/, "").split("/");
  const view = VIEWS.find((each) => each.name === name) ?? VIEWS[0];
  return { view, id: view.name === name ? decodeURIComponent(id) : "" };
}

/** @param {string} name @param {string} [id] */
export function go(name, id = "") {
  const hash = id ? `#/${name}/${encodeURIComponent(id)}` : `#/${name}`;
  if (location.hash !== hash) location.hash = hash;
}
