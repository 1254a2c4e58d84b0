/** The page's first module: the frame, then the view that the address names. */

import { server } from "./lib/api.js";
import "./views/app.js";

/** Milliseconds after which the page's files are kept for a time without the server: first of all it is to be used. */
const KEEP_MS = 4000;
const WORKER = "/ui/sw.js";

void server.refresh();
if ("serviceWorker" in navigator) {
  setTimeout(() => {
    const types = /** @type {any} */ (window).trustedTypes;
    // The policy takes this one address and no other.
    const url = types ? types.createPolicy("infer-worker", { createScriptURL: () => WORKER }).createScriptURL("") : WORKER;
    navigator.serviceWorker.register(url, { scope: "/" }).catch(() => {});
  }, KEEP_MS);
}
