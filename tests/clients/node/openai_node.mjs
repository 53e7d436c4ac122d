// The `openai` client for Node, as it comes: one JSON line for each check, like checks.py.
import { readFileSync } from 'node:fs';
import assert from 'node:assert/strict';
import OpenAI from 'openai';
import { zodFunction, zodResponseFormat } from 'openai/helpers/zod';
import { z } from 'zod';

const installed = new URL('node_modules/openai/package.json', import.meta.url);
const { version } = JSON.parse(readFileSync(installed, 'utf8'));
const s = JSON.parse(readFileSync(process.argv[2], 'utf8'));
const chosen = process.argv[3] ?? '';
const user = [{ role: 'user', content: 'What is the plan?' }];
const greedy = { model: '', messages: user, temperature: 0 };
const long = { ...greedy, max_tokens: 3000, ignore_eos: true };
const parameters = {
  type: 'object',
  properties: { city: { type: 'string', enum: ['Rome', 'Oslo'] } },
  required: ['city'],
  additionalProperties: false,
};
const tool = { type: 'function', function: { name: 'plan', description: 'Plans a journey.', parameters } };
const Journey = z.object({ city: z.enum(['Rome', 'Oslo']), is_far: z.boolean() });

const clientOf = (options = {}) => new OpenAI({ baseURL: `${s.url}/v1`, apiKey: s.key, maxRetries: 0, ...options });
const joined = (parts) => parts.map((part) => part ?? '').join('');
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

async function all(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

async function failed(kind, call) {
  try {
    await call();
  } catch (error) {
    assert.equal(error.constructor, kind, `${error.constructor.name}: ${error.message}`);
    return error;
  }
  throw new Error(`no ${kind.name}`);
}

function counting(options) {
  const sent = [];
  const client = clientOf({ ...options, fetch: (url, init) => (sent.push(url), fetch(url, init)) });
  return [client, sent];
}

async function admin(verb) {
  const headers = { Authorization: `Bearer ${s.admin_key}`, 'Content-Type': 'application/json' };
  const answer = await fetch(`${s.url}/admin/${verb}`, { method: 'POST', headers, body: '{}' });
  assert.ok(answer.ok);
}

async function waitUntilIdle() {
  for (let tries = 0; tries < 100; tries += 1) {
    const answer = await fetch(`${s.url}/debug/accounting`, { headers: { Authorization: `Bearer ${s.key}` } });
    if ((await answer.json()).idle) return;
    await sleep(50);
  }
  throw new Error('not idle after 5 s');
}

const checks = {
  'models: list, retrieve': async () => {
    const models = await all(await clientOf().models.list());
    assert.deepEqual(models.map((model) => model.id), [s.model]);
    assert.equal((await clientOf().models.retrieve(s.model)).owned_by, 'longcat');
  },
  'chat: text, usage, ids': async () => {
    const answer = await clientOf().chat.completions.create(greedy);
    const [choice] = answer.choices;
    assert.ok(choice.message.content.startsWith(s.content));
    assert.equal(choice.finish_reason, 'stop');
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
    assert.ok(answer._request_id && answer.system_fingerprint.startsWith('fp_'));
  },
  'stream: equals the whole, usage, order': async () => {
    const whole = await clientOf().chat.completions.create(greedy);
    const asked = { ...greedy, stream: true, stream_options: { include_usage: true } };
    const chunks = await all(await clientOf().chat.completions.create(asked));
    assert.equal(chunks[0].choices[0].delta.role, 'assistant');
    assert.equal(joined(chunks.map((c) => c.choices[0]?.delta.content)), whole.choices[0].message.content);
    const last = chunks.at(-1);
    assert.deepEqual([last.choices, last.usage.completion_tokens], [[], whole.usage.completion_tokens]);
    assert.equal(chunks.at(-2).choices[0].finish_reason, 'stop');
  },
  'stream helper: events and final message': async () => {
    const running = clientOf().chat.completions.stream(greedy);
    const texts = [];
    running.on('content', (delta) => texts.push(delta));
    const final = await running.finalMessage();
    assert.equal(joined(texts), final.content);
    assert.ok(final.content.startsWith(s.content));
  },
  'stream: left in the middle': async () => {
    const running = await clientOf().chat.completions.create({ ...long, stream: true });
    for await (const chunk of running) {
      if (chunk.choices[0].delta.content) break;
    }
    await waitUntilIdle();
  },
  'tools, auto: a call, its result sent back': async () => {
    const answer = await clientOf().chat.completions.create({ ...greedy, tools: [tool] });
    const { message, finish_reason: reason } = answer.choices[0];
    const [call] = message.tool_calls;
    assert.deepEqual([reason, message.content, call.function.name], ['tool_calls', s.content, s.call_name]);
    assert.deepEqual(JSON.parse(call.function.arguments), s.call_arguments);
    const result = { role: 'tool', tool_call_id: call.id, content: 'By train.' };
    const again = await clientOf().chat.completions.create({ ...greedy, messages: [...user, message, result], tools: [tool] });
    assert.ok(again.usage.prompt_tokens > answer.usage.prompt_tokens);
  },
  'tools, auto, streamed: deltas and helper': async () => {
    const chunks = await all(await clientOf().chat.completions.create({ ...greedy, tools: [tool], stream: true }));
    const calls = chunks.flatMap((c) => c.choices[0].delta.tool_calls ?? []);
    assert.deepEqual([...new Set(calls.map((call) => call.index))], [0]);
    assert.deepEqual(JSON.parse(joined(calls.map((call) => call.function.arguments))), s.call_arguments);
    const final = await clientOf().chat.completions.stream({ ...greedy, tools: [tool] }).finalMessage();
    assert.deepEqual(JSON.parse(final.tool_calls[0].function.arguments), s.call_arguments);
    assert.equal(final.content, s.content);
  },
  'tools, required and named, whole and streamed': async () => {
    for (const choice of ['required', { type: 'function', function: { name: 'plan' } }]) {
      const asked = { ...greedy, tools: [tool], tool_choice: choice, parallel_tool_calls: false };
      const { message } = (await clientOf().chat.completions.create(asked)).choices[0];
      const call = message.tool_calls[0].function;
      assert.equal(call.name, 'plan');
      assert.ok(['Rome', 'Oslo'].includes(JSON.parse(call.arguments).city));
      const chunks = await all(await clientOf().chat.completions.create({ ...asked, stream: true }));
      const parts = chunks.flatMap((c) => c.choices[0].delta.tool_calls ?? []);
      assert.equal(joined(parts.map((part) => part.function.arguments)), call.arguments);
    }
  },
  'runTools: calls the function and goes on': async () => {
    const asked = [];
    const runner = clientOf().chat.completions.runTools(
      {
        ...greedy,
        tools: [{ type: 'function', function: { ...tool.function, parse: JSON.parse, function: (given) => (asked.push(given), 'By train.') } }],
      },
      { maxChatCompletions: 2 },
    );
    await runner.done();
    assert.deepEqual(asked[0], s.call_arguments);
  },
  'response_format: json_schema, streamed too': async () => {
    const format = { type: 'json_schema', json_schema: { name: 'journey', strict: true, schema: parameters } };
    const answer = await clientOf().chat.completions.create({ ...greedy, response_format: format });
    const { content } = answer.choices[0].message;
    assert.ok(['Rome', 'Oslo'].includes(JSON.parse(content).city));
    const chunks = await all(await clientOf().chat.completions.create({ ...greedy, response_format: format, stream: true }));
    assert.equal(joined(chunks.map((c) => c.choices[0].delta.content)), content);
  },
  'parse(): zod model, zod tool': async () => {
    const format = zodResponseFormat(Journey, 'journey');
    const { message } = (await clientOf().chat.completions.parse({ ...greedy, response_format: format })).choices[0];
    assert.equal(typeof message.parsed.is_far, 'boolean');
    const named = { type: 'function', function: { name: 'Journey' } };
    const tools = [zodFunction({ name: 'Journey', parameters: Journey })];
    const other = await clientOf().chat.completions.parse({ ...greedy, tools, tool_choice: named });
    assert.equal(typeof other.choices[0].message.tool_calls[0].function.parsed_arguments.is_far, 'boolean');
  },
  'logprobs, completions': async () => {
    const answer = await clientOf().chat.completions.create({ ...greedy, logprobs: true, top_logprobs: 2 });
    assert.equal(answer.choices[0].logprobs.content.length, answer.usage.completion_tokens);
    const text = await clientOf().completions.create({ model: '', prompt: 'the plan', temperature: 0, max_tokens: 6, logprobs: 1 });
    assert.equal(text.choices[0].logprobs.tokens.length, 6);
    const chunks = await all(await clientOf().completions.create({ model: '', prompt: 'the plan', temperature: 0, max_tokens: 6, stream: true }));
    assert.equal(joined(chunks.map((c) => c.choices[0].text)), text.choices[0].text);
  },
  '400 BadRequestError: code, param': async () => {
    const error = await failed(OpenAI.BadRequestError, () => clientOf().chat.completions.create({ ...greedy, temperature: 3 }));
    assert.deepEqual([error.status, error.code, error.param, error.type], [400, 'invalid_value', 'temperature', 'invalid_request_error']);
    assert.ok(error.requestID);
  },
  '401 AuthenticationError, 404 NotFoundError': async () => {
    await failed(OpenAI.AuthenticationError, () => clientOf({ apiKey: 'wrong' }).models.list());
    const error = await failed(OpenAI.NotFoundError, () => clientOf().chat.completions.create({ ...greedy, model: 'another' }));
    assert.equal(error.code, 'model_not_found');
    await failed(OpenAI.NotFoundError, () => clientOf().embeddings.create({ model: '', input: 'x' }));
  },
  '413 APIError: a body that is too large': async () => {
    const [client, sent] = counting({ maxRetries: 2 });
    const large = { ...greedy, messages: [{ role: 'user', content: 'x'.repeat(40_000_000) }] };
    const error = await failed(OpenAI.APIError, () => client.chat.completions.create(large));
    assert.deepEqual([error.status, error.code, sent.length], [413, 'body_too_large', 1]);
  },
  '504 InternalServerError, not repeated': async () => {
    const [client, sent] = counting({ maxRetries: 2 });
    const options = { headers: { 'X-Request-Timeout': '0.5' } };
    const error = await failed(OpenAI.InternalServerError, () => client.chat.completions.create(long, options));
    assert.deepEqual([error.status, error.code, sent.length], [504, 'deadline_exceeded', 1]);
  },
  'an error in the middle of a stream: APIError': async () => {
    const options = { headers: { 'X-Request-Timeout': '1' } };
    let seen = 0;
    const error = await failed(OpenAI.APIError, async () => {
      for await (const _ of await clientOf().chat.completions.create({ ...long, stream: true }, options)) seen += 1;
    });
    assert.ok(seen > 1);
    assert.deepEqual([error.code, error.type], ['deadline_exceeded', 'server_error']);
    await waitUntilIdle();
  },
  'APIConnectionTimeoutError, APIConnectionError, abort': async () => {
    await failed(OpenAI.APIConnectionTimeoutError, () => clientOf({ timeout: 500 }).chat.completions.create(long));
    await failed(OpenAI.APIConnectionError, () => clientOf({ baseURL: s.dead_url }).chat.completions.create(greedy));
    const stop = new AbortController();
    setTimeout(() => stop.abort(), 300);
    await failed(OpenAI.APIUserAbortError, () => clientOf().chat.completions.create(long, { signal: stop.signal }));
    await waitUntilIdle();
  },
  '503 while draining; a retry lives through it': async () => {
    await admin('drain');
    try {
      const error = await failed(OpenAI.InternalServerError, () => clientOf().chat.completions.create(greedy));
      assert.deepEqual([error.status, error.code], [503, 'draining']);
      setTimeout(() => admin('undrain'), 1000);
      const [client, sent] = counting({ maxRetries: 2 });
      await client.chat.completions.create(greedy);
      assert.equal(sent.length, 2);
    } finally {
      await admin('undrain');
    }
  },
  '429 RateLimitError; a retry gets through': async () => {
    const narrow = { baseURL: `${s.narrow_url}/v1` };
    const running = await clientOf(narrow).chat.completions.create({ ...long, stream: true });
    const error = await failed(OpenAI.RateLimitError, () => clientOf(narrow).chat.completions.create(greedy));
    assert.equal(error.code, 'too_many_requests');
    setTimeout(() => running.controller.abort(), 300);
    const [client, sent] = counting({ ...narrow, maxRetries: 3 });
    await client.chat.completions.create(greedy);
    assert.ok(sent.length >= 2);
    return `${sent.length} tries`;
  },
};

let bad = 0;
for (const [check, run] of Object.entries(checks)) {
  if (!check.includes(chosen)) continue;
  const began = Date.now();
  const line = { client: 'openai (Node)', version: `${version}, Node ${process.versions.node}`, check, ok: true, note: '' };
  try {
    line.note = (await run()) ?? '';
  } catch (error) {
    console.error(error);
    line.ok = false;
    line.note = `${error.constructor.name}: ${error.message}`.slice(0, 300);
    bad += 1;
  }
  console.log(JSON.stringify({ ...line, seconds: (Date.now() - began) / 1000 }));
}
process.exit(bad ? 1 : 0);
