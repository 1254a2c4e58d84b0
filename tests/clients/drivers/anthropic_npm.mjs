// Anthropic's own client for JavaScript, as its users write it.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";
import { jsonSchemaOutputFormat } from "@anthropic-ai/sdk/helpers/json-schema";
import {
  CITIES, KEY, LOOP_ANSWER, LOOPS, MODEL, QUESTION, TOOL_MODEL, URL_, WEATHER,
  check, loopModels, report, untilCancelled, weatherIsValid,
} from "./checks.mjs";

const client = new Anthropic({ baseURL: URL_.replace(/\/v1$/, ""), apiKey: KEY });
const looping = new Anthropic({ baseURL: LOOPS.replace(/\/v1$/, ""), apiKey: "none" });
const short = { model: MODEL, messages: QUESTION, max_tokens: 16, temperature: 0 };
const tools = [{ name: "weather", description: "How the weather is.", input_schema: WEATHER }];
const calling = { model: TOOL_MODEL, messages: QUESTION, max_tokens: 400, tools };
const cities = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const described = { name: "weather", description: "How the weather is." };
const THINKING = "llama.cpp.Qwen-QwQ-32B"; // its template reads whether a request asks for it
let message;

const textOf = ({ content }) =>
  content.map((block) => (block.type === "text" ? block.text : "")).join("");
const usesOf = ({ content }) => content.filter((block) => block.type === "tool_use");

await check("models", async () => {
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  assert.deepEqual(names, [MODEL, TOOL_MODEL]);
  assert.equal((await client.models.retrieve(MODEL)).id, MODEL);
});

await check("messages", async () => {
  message = await client.messages.create(short);
  assert.deepEqual([message.role, message.stop_reason], ["assistant", "max_tokens"]);
  assert.ok(textOf(message));
  assert.equal(message.usage.output_tokens, 16);
  assert.ok(message._request_id);
  const messages = [{ role: "user", content: [{ type: "text", text: QUESTION[0].content }] }];
  assert.equal(textOf(await client.messages.create({ ...short, messages })), textOf(message));
});

await check("count tokens", async () => {
  const asked = { model: MODEL, messages: QUESTION, system: "Be brief." };
  const counted = await client.messages.countTokens(asked);
  const { usage } = await client.messages.create({ ...asked, max_tokens: 1 });
  const cached = usage.cache_read_input_tokens + usage.cache_creation_input_tokens;
  assert.equal(counted.input_tokens, usage.input_tokens + cached);
});

await check("create, stream", async () => {
  const events = [];
  for await (const event of await client.messages.create({ ...short, stream: true })) {
    events.push(event);
  }
  const pieces = events.filter((event) => event.type === "content_block_delta");
  assert.equal(pieces.map((event) => event.delta.text).join(""), textOf(message));
  assert.deepEqual([events[0].type, events.at(-1).type], ["message_start", "message_stop"]);
});

await check("stream helper", async () => {
  let pieces = "";
  const stream = client.messages.stream(short).on("text", (delta) => { pieces += delta; });
  const final = await stream.finalMessage();
  assert.deepEqual([pieces, textOf(final)], [textOf(message), textOf(message)]);
  assert.equal(await stream.finalText(), textOf(message));
  assert.deepEqual([final.stop_reason, final.usage.output_tokens], ["max_tokens", 16]);
  assert.ok(stream.request_id);
});

await check("stop", async () => {
  const text = textOf(message);
  const word = text.split(" ")[2];
  const cut = await client.messages.create({ ...short, stop_sequences: [word] });
  assert.deepEqual([cut.stop_reason, cut.stop_sequence], ["stop_sequence", word]);
  assert.equal(textOf(cut), text.slice(0, text.indexOf(word)));
});

await check("tool call and result", async () => {
  const forced = { type: "tool", name: "weather", disable_parallel_tool_use: true };
  const called = await client.messages.create({ ...calling, tool_choice: forced });
  assert.equal(called.stop_reason, "tool_use");
  const [use] = usesOf(called);
  assert.ok(weatherIsValid(use.input));
  const result = { type: "tool_result", tool_use_id: use.id, content: "sunny" };
  const answer = { role: "assistant", content: called.content };
  const messages = [...QUESTION, answer, { role: "user", content: [result] }];
  assert.ok(textOf(await client.messages.create({ ...calling, messages, max_tokens: 16 })));
});

await check("tool call, stream helper", async () => {
  let pieces = "";
  const forced = { type: "any", disable_parallel_tool_use: true };
  const stream = client.messages.stream({ ...calling, tool_choice: forced });
  stream.on("inputJson", (delta) => { pieces += delta; });
  const [use] = usesOf(await stream.finalMessage());
  assert.deepEqual(JSON.parse(pieces), use.input);
  assert.ok(weatherIsValid(use.input));
});

await check("structured output", async () => {
  const format = jsonSchemaOutputFormat(WEATHER, { transform: false });
  const asked = { model: MODEL, messages: QUESTION, max_tokens: 400, output_config: { format } };
  assert.ok(weatherIsValid((await client.messages.parse(asked)).parsed_output));
  assert.ok(weatherIsValid((await client.messages.stream(asked).finalMessage()).parsed_output));
});

await check("typed errors", async () => {
  const rejects = (promise, kind, type, word) =>
    assert.rejects(promise, (error) => {
      assert.ok(error instanceof kind, `${error} is no ${kind.name}`);
      if (type) assert.equal(error.type, type);
      assert.ok(error.apiMessage.includes(word), error.apiMessage);
      assert.ok(error.requestID);
      return true;
    });
  const create = (fields) => client.messages.create({ ...short, ...fields });
  const invalid = [Anthropic.BadRequestError, "invalid_request_error"];
  const unknown = [Anthropic.NotFoundError, "not_found_error"];
  const long = [{ role: "user", content: "A fox. ".repeat(3000) }];
  await rejects(create({ model: "nobody" }), ...unknown, MODEL);
  await rejects(client.messages.stream({ ...short, model: "nobody" }).done(), ...unknown, MODEL);
  await rejects(client.models.retrieve("nobody"), Anthropic.NotFoundError, null, "model");
  await rejects(create({ messages: long }), ...invalid, "prompt is too long");
  await rejects(create({ max_tokens: 0 }), ...invalid, "max_tokens");
  const wrong = client.withOptions({ apiKey: "wrong" }).messages.create(short);
  await rejects(wrong, Anthropic.AuthenticationError, "authentication_error", "key");
});

await check("cancel", async () => {
  const endless = { ...short, max_tokens: 1500, ignore_eos: true };
  const stream = client.messages.stream(endless);
  await stream.emitted("text");
  stream.abort();
  await untilCancelled();
  for await (const event of await client.messages.create({ ...endless, stream: true })) {
    if (event.type === "content_block_delta") break;
  }
  await untilCancelled();
});

await check("thinking", async () => {
  const messages = [{ role: "user", content: "Weather?" }];
  const asked = { model: THINKING, messages, max_tokens: 2000 };
  const thinking = { type: "enabled", budget_tokens: 1024 };
  let pieces = "";
  const stream = looping.messages.stream({ ...asked, thinking });
  stream.on("thinking", (delta) => { pieces += delta; });
  const [thought, ...rest] = (await stream.finalMessage()).content;
  assert.deepEqual([thought.type, thought.thinking, pieces], ["thinking", "It asks.", "It asks."]);
  assert.equal(typeof thought.signature, "string");
  assert.ok(rest.length && rest.every((block) => block.type !== "thinking"));
  const whole = await looping.messages.create({ ...asked, thinking });
  assert.deepEqual(whole.content[0], thought);
  const without = { ...asked, thinking: { type: "disabled" } };
  const { content } = await looping.messages.create(without);
  assert.ok(content.length && content.every((block) => block.type !== "thinking"));
});

// Three calls and an answer; answers go back as they came.
async function loop(model, streams) {
  const messages = [{ role: "user", content: "Weather?" }];
  const asked = [];
  let answer;
  for (let turn = 0; turn < 4; turn++) {
    const tool = { ...described, input_schema: cities };
    const how = { model, messages, tools: [tool], max_tokens: 400 };
    answer = streams
      ? await looping.messages.stream(how).finalMessage()
      : await looping.messages.create(how);
    messages.push({ role: "assistant", content: answer.content });
    const results = usesOf(answer).map(({ id, input }) => {
      asked.push(input.city);
      return { type: "tool_result", tool_use_id: id, content: `${input.city} is sunny` };
    });
    if (results.length) messages.push({ role: "user", content: results });
  }
  assert.deepEqual([asked, textOf(answer)], [CITIES, LOOP_ANSWER], model);
}

// The client's own loop over tools.
async function runner(model, stream) {
  const asked = [];
  const run = ({ city }) => {
    asked.push(city);
    return `${city} is sunny`;
  };
  const tool = betaTool({ ...described, inputSchema: cities, run });
  const messages = [{ role: "user", content: "Weather?" }];
  const how = { model, messages, tools: [tool], max_tokens: 400, stream };
  const last = await looping.beta.messages.toolRunner(how).runUntilDone();
  assert.deepEqual([asked, textOf(last)], [CITIES, LOOP_ANSWER], model);
}

const loopNames = await loopModels();
const loops = `tool loops, ${loopNames.length} published templates`;
for (const streams of [false, true]) {
  const how = streams ? `${loops}, streams` : loops;
  await check(how, async () => {
    for (const model of loopNames) await loop(model, streams);
  });
  await check(`tool runner, ${how}`, async () => {
    for (const model of loopNames) await runner(model, streams);
  });
}

report("@anthropic-ai/sdk");
