// OpenAI's client for JavaScript over `/v1/responses`: what openai_npm.mjs does with chats.

import assert from "node:assert/strict";
import OpenAI from "openai";
import {
  CITIES, KEY, LOOP_ANSWER, LOOPS, MODEL, QUESTION, TOOL_MODEL, URL_, WEATHER,
  check, loopModels, untilCancelled, weatherIsValid,
} from "./checks.mjs";

const client = new OpenAI({ baseURL: URL_, apiKey: KEY });
const short = { model: MODEL, input: QUESTION, max_output_tokens: 16, temperature: 0 };
const tools = [{ type: "function", name: "weather", parameters: WEATHER, strict: true }];

export async function responses() {
  let done;

  await check("responses: create", async () => {
    done = await client.responses.create(short);
    assert.ok(done.output_text);
    assert.equal(done.incomplete_details.reason, "max_output_tokens");
    assert.equal(done.usage.output_tokens, 16);
    const counted = await client.responses.inputTokens.count({ model: MODEL, input: QUESTION });
    assert.equal(counted.input_tokens, done.usage.input_tokens);
  });

  await check("responses: create, stream", async () => {
    const events = [];
    for await (const event of await client.responses.create({ ...short, stream: true })) {
      events.push(event);
    }
    const pieces = events.filter((event) => event.type === "response.output_text.delta");
    assert.equal(pieces.map((event) => event.delta).join(""), done.output_text);
    assert.equal(events[0].type, "response.created");
    assert.equal(events.at(-1).type, "response.incomplete");
  });

  await check("responses: stream helper", async () => {
    let pieces = "";
    const stream = client.responses.stream(short);
    stream.on("response.output_text.delta", (event) => { pieces += event.delta; });
    assert.equal((await stream.finalResponse()).output_text, done.output_text);
    assert.equal(pieces, done.output_text);
  });

  await check("responses: stored", async () => {
    assert.equal((await client.responses.retrieve(done.id)).output_text, done.output_text);
    const next = { ...short, input: "And then?", previous_response_id: done.id };
    const follows = await client.responses.create(next);
    assert.ok(follows.usage.input_tokens > done.usage.input_tokens);
    await client.responses.delete(follows.id);
    await assert.rejects(client.responses.retrieve(follows.id), OpenAI.NotFoundError);
  });

  await check("responses: structured output", async () => {
    const format = { type: "json_schema", name: "weather", schema: WEATHER, strict: true };
    const asked = { ...short, max_output_tokens: 400, text: { format } };
    assert.ok(weatherIsValid((await client.responses.parse(asked)).output_parsed));
  });

  await check("responses: tool call, stream helper", async () => {
    const asked = { ...short, model: TOOL_MODEL, max_output_tokens: 400, tools };
    const how = { ...asked, tool_choice: "required", parallel_tool_calls: false };
    let pieces = "";
    const stream = client.responses.stream(how);
    stream.on("response.function_call_arguments.delta", (event) => { pieces += event.delta; });
    const call = (await stream.finalResponse()).output.at(-1);
    assert.equal(pieces, call.arguments);
    assert.ok(weatherIsValid(JSON.parse(call.arguments)));
  });

  await check("responses: typed errors", async () => {
    const unknown = client.responses.create({ ...short, model: "nobody" });
    await assert.rejects(unknown, OpenAI.NotFoundError);
    const long = client.responses.create({ ...short, input: "A fox. ".repeat(3000) });
    await assert.rejects(long, OpenAI.BadRequestError);
  });

  await check("responses: cancel", async () => {
    const endless = { ...short, max_output_tokens: 1500, store: false, ignore_eos: true };
    const stream = await client.responses.create({ ...endless, stream: true });
    for await (const event of stream) if (event.type === "response.output_text.delta") break;
    await untilCancelled();
  });
}

// Whole answers from the server's storage, streams from the whole history.
export async function responseLoops() {
  const names = await loopModels();
  for (const streams of [false, true]) {
    const name = `responses: tool loops, ${names.length} published templates`;
    await check(streams ? `${name}, streams` : `${name}, previous_response_id`, async () => {
      for (const model of names) await loop(model, streams);
    });
  }
}

async function loop(model, streams) {
  const looping = new OpenAI({ baseURL: LOOPS, apiKey: "none" }).responses;
  const parameters = { type: "object", properties: { city: { type: "string" } } };
  const how = { model, tools: [{ type: "function", name: "weather", parameters }] };
  const history = [{ role: "user", content: "Weather?" }];
  let fresh = [...history], asked = [], answer, previous;
  for (let turn = 0; turn < 4; turn++) {
    const told = { ...how, max_output_tokens: 400 };
    answer = streams
      ? await looping.stream({ ...told, input: history, store: false }).finalResponse()
      : await looping.create({ ...told, input: fresh, previous_response_id: previous });
    previous = answer.id;
    fresh = [];
    for (const item of answer.output.filter((item) => item.type === "function_call")) {
      asked.push(JSON.parse(item.arguments).city);
      const output = `${asked.at(-1)} is sunny`;
      fresh.push({ type: "function_call_output", call_id: item.call_id, output });
    }
    history.push(...answer.output, ...fresh);
  }
  assert.deepEqual([asked, answer.output_text], [CITIES, LOOP_ANSWER], model);
}
