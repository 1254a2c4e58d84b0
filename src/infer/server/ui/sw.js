/** The page's files where the server cannot be reached, so that an installed page opens and shows its conversations. The
 * server's are always preferred; what the API answers is never kept. */

const SHELL = "infer-shell";
/** What the policy of the page's files has, and that of other pages has not. */
const MARK = "infer-worker";
const worker = /** @type {any} */ (self);

worker.addEventListener("install", (/** @type {any} */ event) => {
  event.waitUntil(fill());
  worker.skipWaiting();
});

worker.addEventListener("activate", (/** @type {any} */ event) => event.waitUntil(worker.clients.claim()));

worker.addEventListener("fetch", (/** @type {any} */ event) => {
  const { request } = event;
  const { origin, pathname } = new URL(request.url);
  const isFile = pathname.startsWith("/ui/") || (pathname === "/" && request.mode === "navigate");
  if (request.method === "GET" && origin === location.origin && isFile) event.respondWith(answer(request));
});

/** Take the files that the first view needs: those that the page names. */
async function fill() {
  const cache = await caches.open(SHELL);
  const start = new Request("/", { headers: { accept: "text/html" } });
  const page = await fetch(start);
  const names = [...(await page.clone().text()).matchAll(/(?:href|src)="(\/ui\/[^"]+)"/g)].map((found) => found[1]);
  await cache.put("/", page);
  await cache.addAll([...new Set(names)]);
}

/** @param {Request} request */
async function answer(request) {
  const cache = await caches.open(SHELL);
  const name = new URL(request.url).pathname;
  try {
    const found = await fetch(request);
    const isOurs = (found.headers.get("content-security-policy") ?? "").includes(MARK);
    if (found.status === 200 && isOurs) await cache.put(name, found.clone());
    // Another program has this address now: it is none of our business.
    else if (name === "/" && found.ok) await Promise.all([caches.delete(SHELL), worker.registration.unregister()]);
    return found;
  } catch (error) {
    const kept = await cache.match(name, { ignoreVary: true });
    if (kept) return kept;
    throw error;
  }
}
