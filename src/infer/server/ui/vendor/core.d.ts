// Types of core.js, from the packages in ui/node_modules.
export { LitElement, html, nothing, render } from "lit";
export { repeat } from "lit/directives/repeat.js";
export { live } from "lit/directives/live.js";
export { Marked } from "marked";
export { default as DOMPurify } from "dompurify";
export { openDB } from "idb";
