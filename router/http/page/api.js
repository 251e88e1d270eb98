// Requests to the router: state, and texts as they come.

export async function getJson(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${path}: status ${answer.status}`);
  return answer.json();
}

export async function post(path, body, signal) {
  const answer = await fetch(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  return answer;
}

// What the fields ask for, as the path and the body of a streaming request.
export function requestOf(fields, mode) {
  const speculation = { mode, include_tokens: true, include_rounds: true };
  if (fields.numDraftTokens !== null) speculation.num_draft_tokens = fields.numDraftTokens;
  if (fields.drafter) speculation.drafter = fields.drafter;
  const body = {
    max_tokens: fields.maxTokens,
    temperature: fields.temperature,
    stream: true,
    stream_options: { include_usage: true },
    speculative_decoding: speculation,
  };
  if (fields.seed !== null) body.seed = fields.seed;
  return fields.chat
    ? ["/v1/chat/completions", { ...body, logprobs: true, messages: [{ role: "user", content: fields.prompt }] }]
    : ["/v1/completions", { ...body, logprobs: 0, prompt: fields.prompt }];
}

// Chunks of a stream, parsed; an event may be cut anywhere on its way.
export async function* chunksOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the connection was lost");
    held += value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

// Texts in the background: requests of up to 16 choices, as a browser holds few connections to one host.
export class Background {
  #running = [];

  async set(count, onError) {
    for (const controller of this.#running) controller.abort();
    this.#running = [];
    for (let left = count; left > 0; left -= 16) {
      const controller = new AbortController();
      this.#running.push(controller);
      this.#repeat(Math.min(left, 16), controller.signal).catch((error) => {
        if (error.name !== "AbortError") onError(error);
      });
    }
  }

  async #repeat(n, signal) {
    const body = {
      prompt: "Once upon a time there was",
      n,
      max_tokens: 128,
      temperature: 0.8,
      ignore_eos: true,
      speculative_decoding: { traffic_class: "background" },
    };
    while (!signal.aborted) await (await post("/v1/completions", body, signal)).json();
  }
}
