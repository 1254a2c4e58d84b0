// Bundles the libraries of the page: `npm ci && npm run vendor` in this folder.
//
// Writes src/infer/server/ui/vendor: one file for each group of libraries, the licences, and
// VENDORED.md with versions and SHA-256. The same package-lock.json gives the same bytes.
// `--out FOLDER` writes elsewhere; the test that compares does so.

import { createHash } from "node:crypto";
import { copyFile, mkdir, readFile, readdir, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const at = process.argv.indexOf("--out");
const out = at < 0 ? join(here, "../src/infer/server/ui/vendor") : process.argv[at + 1];

const LANGUAGES = [
  "bash", "c", "cpp", "csharp", "css", "diff", "go", "java", "javascript", "json",
  "kotlin", "markdown", "php", "python", "ruby", "rust", "sql", "typescript", "xml", "yaml",
];

/** Each file with what it exports and the packages that are in it. */
const BUNDLES = {
  core: {
    source: `
      export { LitElement, html, nothing, render } from "lit";
      export { repeat } from "lit/directives/repeat.js";
      export { live } from "lit/directives/live.js";
      export { Marked } from "marked";
      export { default as DOMPurify } from "dompurify";
      export { openDB } from "idb";`,
    packages: [
      "lit", "lit-html", "lit-element", "@lit/reactive-element", "marked", "dompurify", "idb",
    ],
  },
  highlight: {
    source: `
      import hljs from "highlight.js/lib/core";
      ${LANGUAGES.map((name) => `import ${name} from "highlight.js/lib/languages/${name}";`).join("\n")}
      ${LANGUAGES.map((name) => `hljs.registerLanguage("${name}", ${name});`).join("\n")}
      export default hljs;`,
    packages: ["highlight.js"],
  },
  katex: { source: `export { default } from "katex";`, packages: ["katex"] },
  uplot: { source: `export { default } from "uplot";`, packages: ["uplot"] },
  schema: {
    source: `export { Validator } from "@cfworker/json-schema";`,
    packages: ["@cfworker/json-schema"],
  },
};

/** Licences of packages that come without one, from the repositories that they name. */
const LICENCES = { "@cfworker/json-schema": "licences/cfworker-json-schema.txt" };

/** @param {string} name */
async function packageOf(name) {
  const folder = join(here, "node_modules", name);
  const about = JSON.parse(await readFile(join(folder, "package.json"), "utf8"));
  const own = (await readdir(folder)).sort().find((entry) => /^licen[cs]e/i.test(entry));
  const file = own ? join(folder, own) : LICENCES[name] && join(here, LICENCES[name]);
  if (!file) throw new Error(`${name} has no licence text: put one into ui/licences and name it in LICENCES`);
  const text = await readFile(file, "utf8");
  return { name, version: about.version, licence: about.license, text };
}

await mkdir(out, { recursive: true });
for (const [name, { source }] of Object.entries(BUNDLES)) {
  await build({
    stdin: { contents: source, resolveDir: here, sourcefile: `${name}.js` },
    outfile: join(out, `${name}.js`),
    bundle: true,
    minify: true,
    format: "esm",
    target: "es2022",
    charset: "utf8",
    legalComments: "none",
    tsconfigRaw: {},  // tsconfig.json is for the type check
    define: { "process.env.NODE_ENV": '"production"' },
    logLevel: "warning",
  });
}
await copyFile(join(here, "node_modules/uplot/dist/uPlot.min.css"), join(out, "uplot.css"));

const rows = [];
const licences = [];
for (const [name, { packages }] of Object.entries(BUNDLES)) {
  const found = await Promise.all(packages.map(packageOf));
  const files = name === "uplot" ? ["uplot.js", "uplot.css"] : [`${name}.js`];
  for (const file of files) {
    const hash = createHash("sha256").update(await readFile(join(out, file))).digest("hex");
    const what = found.map((each) => `${each.name} ${each.version} (${each.licence})`).join(", ");
    rows.push(`| \`${file}\` | ${what} | \`${hash}\` |`);
  }
  for (const { name: title, version, text } of found) {
    const body = text.trim().replace(/\r\n/g, "\n");
    licences.push(`${title} ${version}\n${"=".repeat(72)}\n\n${body}\n`);
  }
}
await writeFile(join(out, "LICENSES.txt"), licences.join("\n\n"));
await writeFile(
  join(out, "VENDORED.md"),
  `# Libraries of other authors

The files beside this page are libraries, bundled without changes by \`ui/vendor.mjs\` from the
versions in \`ui/package-lock.json\`. Do not edit them; change the versions there, run
\`npm ci && npm run vendor\` in \`ui/\`, and commit what it writes. \`pytest -m browser\` compares the
bytes. The licences are in \`LICENSES.txt\`.

| file | what is in it | SHA-256 |
|---|---|---|
${rows.join("\n")}
`,
);
