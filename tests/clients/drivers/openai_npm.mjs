// OpenAI's own client for JavaScript, as its users write it.

import assert from "node:assert/strict";
import OpenAI from "openai";
import {
  CITIES, KEY, LOOP_ANSWER, LOOPS, MODEL, QUESTION, STORY, TOOL_MODEL, URL_, WEATHER,
  check, loopModels, report, untilCancelled, weatherIsValid,
} from "./checks.mjs";
import { responseLoops, responses } from "./openai_responses.mjs";

const client = new OpenAI({ baseURL: URL_, apiKey: KEY });
const greedy = { model: MODEL, messages: QUESTION, max_tokens: 16, temperature: 0 };
const drawn = { model: MODEL, messages: QUESTION, max_tokens: 16 };
const tools = [{ type: "function", function: { name: "weather", parameters: WEATHER } }];
const json = { type: "json_schema", json_schema: { name: "weather", schema: WEATHER, strict: true } };
let chat, text;

await check("models", async () => {
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  assert.deepEqual(names, [MODEL, TOOL_MODEL]);
  assert.equal((await client.models.retrieve(MODEL)).id, MODEL);
});

await check("completion", async () => {
  const asked = { model: MODEL, prompt: STORY, max_tokens: 12, temperature: 0 };
  const done = await client.completions.create(asked);
  let pieces = "";
  for await (const piece of await client.completions.create({ ...asked, stream: true })) {
    pieces += piece.choices[0].text;
  }
  assert.ok(pieces.trim());
  assert.equal(pieces, done.choices[0].text);
});

await check("chat", async () => {
  chat = await client.chat.completions.create(greedy);
  text = chat.choices[0].message.content;
  assert.ok(text);
  assert.equal(chat.choices[0].finish_reason, "length");
  assert.ok(chat._request_id);
});

await check("chat stream", async () => {
  let pieces = "";
  for await (const chunk of await client.chat.completions.create({ ...greedy, stream: true })) {
    pieces += chunk.choices[0].delta.content ?? "";
  }
  assert.equal(pieces, text);
});

await check("stream helper", async () => {
  const stream = client.chat.completions.stream(greedy);
  let pieces = "";
  stream.on("content", (delta) => { pieces += delta; });
  assert.equal((await stream.finalChatCompletion()).choices[0].message.content, text);
  assert.equal(pieces, text);
});

await check("usage", async () => {
  assert.equal(chat.usage.completion_tokens, 16);
  const asked = { ...greedy, stream: true, stream_options: { include_usage: true } };
  let last;
  for await (const chunk of await client.chat.completions.create(asked)) last = chunk;
  assert.equal(last.usage.completion_tokens, 16);
  assert.equal(last.usage.prompt_tokens, chat.usage.prompt_tokens);
});

await check("n", async () => {
  const several = await client.chat.completions.create({ ...drawn, n: 3, seed: 1 });
  assert.equal(new Set(several.choices.map((choice) => choice.message.content)).size, 3);
});

await check("seed", async () => {
  const texts = [];
  for (const seed of [5, 5, 6]) {
    const done = await client.chat.completions.create({ ...drawn, seed });
    texts.push(done.choices[0].message.content);
  }
  assert.equal(texts[0], texts[1]);
  assert.notEqual(texts[0], texts[2]);
});

await check("stop", async () => {
  const word = text.split(" ")[2];
  const cut = (await client.chat.completions.create({ ...greedy, stop: [word] })).choices[0];
  assert.equal(cut.message.content, text.slice(0, text.indexOf(word)));
  assert.equal(cut.finish_reason, "stop");
});

await check("logprobs", async () => {
  const asked = { ...greedy, logprobs: true, top_logprobs: 2 };
  const { content } = (await client.chat.completions.create(asked)).choices[0].logprobs;
  assert.equal(content.map((entry) => entry.token).join(""), text);
  assert.ok(content.every((entry) => entry.top_logprobs[0].logprob === entry.logprob));
});

await check("tool call", async () => {
  const forced = { type: "function", function: { name: "weather" } };
  const asked = { ...drawn, max_tokens: 400, tools, tool_choice: forced };
  const { message } = (await client.chat.completions.create(asked)).choices[0];
  const [call] = message.tool_calls;
  assert.ok(weatherIsValid(JSON.parse(call.function.arguments)));
  const result = { role: "tool", tool_call_id: call.id, content: "sunny" };
  const messages = [...QUESTION, message, result];
  const next = { ...greedy, model: TOOL_MODEL, messages, tools };
  assert.ok((await client.chat.completions.create(next)).choices[0].message.content);
});

await check("tool call stream", async () => {
  const stream = client.chat.completions.stream({
    ...drawn, model: TOOL_MODEL, max_tokens: 400, tools, tool_choice: "required",
    parallel_tool_calls: false,
  });
  const [call] = (await stream.finalMessage()).tool_calls;
  assert.ok(weatherIsValid(JSON.parse(call.function.arguments)));
});

const loopNames = await loopModels();
for (const streams of [false, true]) {
  const name = `tool loops, ${loopNames.length} published templates${streams ? ", streams" : ""}`;
  await check(name, async () => {
    const looping = new OpenAI({ baseURL: LOOPS, apiKey: "none" }).chat.completions;
    const parameters = { type: "object", properties: { city: { type: "string" } } };
    const tool = { type: "function", function: { name: "weather", parameters } };
    for (const model of loopNames) {
      const messages = [{ role: "user", content: "Weather?" }];
      const asked = [];
      for (let turn = 0; turn < 4; turn++) {
        const how = { model, messages, tools: [tool], max_tokens: 400 };
        const message = streams
          ? await looping.stream(how).finalMessage()
          : (await looping.create(how)).choices[0].message;
        messages.push(message);
        for (const call of message.tool_calls ?? []) {
          asked.push(JSON.parse(call.function.arguments).city);
          const content = `${asked.at(-1)} is sunny`;
          messages.push({ role: "tool", tool_call_id: call.id, content });
        }
      }
      assert.deepEqual([asked, messages.at(-1).content], [CITIES, LOOP_ANSWER], model);
    }
  });
}

await check("structured output", async () => {
  const asked = { ...drawn, max_tokens: 400, response_format: json };
  const done = await client.chat.completions.parse(asked);
  assert.ok(weatherIsValid(done.choices[0].message.parsed));
});

await check("typed errors", async () => {
  const rejects = (promise, kind, word) =>
    assert.rejects(promise, (error) => error instanceof kind && error.message.includes(word));
  const unknown = client.chat.completions.create({ ...drawn, model: "nobody" });
  await rejects(unknown, OpenAI.NotFoundError, MODEL);
  const long = { ...drawn, messages: [{ role: "user", content: "A fox. ".repeat(3000) }] };
  await rejects(client.chat.completions.create(long), OpenAI.BadRequestError, "context length");
  const hot = client.chat.completions.create({ ...drawn, temperature: 9 });
  await rejects(hot, OpenAI.UnprocessableEntityError, "temperature");
  await rejects(client.models.retrieve("nobody"), OpenAI.NotFoundError, "model");
  const wrong = client.withOptions({ apiKey: "wrong" }).models.list();
  await rejects(wrong, OpenAI.AuthenticationError, "key");
});

await check("cancel", async () => {
  const endless = { ...drawn, max_tokens: 1500, stream: true, ignore_eos: true };
  for await (const _ of await client.chat.completions.create(endless)) break;
  await untilCancelled();
  const stream = await client.chat.completions.create(endless);
  await stream[Symbol.asyncIterator]().next();
  stream.controller.abort();
  await untilCancelled();
});

await responses();
await responseLoops();

report("openai");
