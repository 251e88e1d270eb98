// The page: what the fields ask for, the text as it comes, the comparison, the load.

import { Background, chunksOf, getJson, post, requestOf } from "./api.js";
import { planChart, stepsChart } from "./charts.js";
import { Rounds, Text, element } from "./view.js";

const POLL_MILLISECONDS = 500;
const PLAN_MILLISECONDS = 10_000;
const background = new Background();
let running = null;

const number = (id) => (element(id).value === "" ? null : Number(element(id).value));

function fields() {
  return {
    prompt: element("prompt").value,
    maxTokens: number("max-tokens"),
    temperature: number("temperature"),
    seed: number("seed"),
    numDraftTokens: number("num-draft-tokens"),
    drafter: element("drafter").value,
    chat: element("chat").checked,
  };
}

// A text to its end; `onChoice` takes what each chunk says, `onSpeed` tokens a second so far.
async function generate(asked, mode, signal, onChoice, onSpeed) {
  const [path, body] = requestOf(asked, mode);
  const answer = await post(path, body, signal);
  const told = { text: "", tokens: 0, usage: null, metrics: null };
  let first = 0;
  let began = 0;
  for await (const chunk of chunksOf(answer)) {
    told.usage = chunk.usage ?? told.usage;
    told.metrics = chunk.metrics ?? told.metrics;
    for (const choice of chunk.choices) {
      told.text += choice.delta?.content ?? choice.text ?? "";
      const said = choice.speculative_decoding ?? {};
      told.tokens += said.tokens?.length ?? 0;
      onChoice(said);
    }
    // The first piece took the prompt's time: speed is of what came after it.
    if (!first) [first, began] = [told.tokens, performance.now()];
    else onSpeed(((told.tokens - first) * 1000) / (performance.now() - began));
  }
  return told;
}

async function run(work) {
  running?.abort();
  const own = new AbortController();
  running = own;
  busy(true);
  say("");
  try {
    await work(own.signal);
  } catch (error) {
    say(error.name === "AbortError" ? "stopped" : error.message);
  } finally {
    if (running === own) {
      running = null;
      busy(false);
    }
  }
}

function busy(is) {
  element("stop").disabled = !is;
  element("text").setAttribute("aria-busy", is);
}

const say = (text) => (element("state").textContent = text);
const shown = (speed) => speed.toFixed(1);

function watch(text, rounds) {
  return (said) => {
    if (said.tokens) text.add(said.tokens);
    if (said.rounds) rounds.add(said.rounds);
  };
}

async function show(signal) {
  const onSpeed = (speed) => (element("speed").textContent = shown(speed));
  const told = await generate(fields(), element("mode").value, signal, watch(new Text(), new Rounds()), onSpeed);
  const { mean_acceptance_length: length, num_spec_steps: steps } = told.metrics.speculative_decoding;
  const rounds = steps ? `${steps} rounds drafted, ${length.toFixed(2)} tokens each` : "no round drafted";
  say(`${told.usage.completion_tokens} tokens; ${rounds}`);
}

async function compare(signal) {
  element("comparison").hidden = false;
  element("verdict").textContent = "";
  const asked = fields();
  if (asked.temperature > 0) asked.seed ??= 0; // without one, two texts are two draws
  const mode = element("mode").value === "off" ? "auto" : element("mode").value;
  const texts = {};
  for (const side of ["on", "off"]) {
    element(`text-${side}`).textContent = "";
    element(`speed-${side}`).textContent = "0";
  }
  for (const [side, own] of [["on", mode], ["off", "off"]]) {
    const drawn = side === "on" ? watch(new Text(), new Rounds()) : () => {};
    const places = [`speed-${side}`, ...(side === "on" ? ["speed"] : [])];
    const speed = (value) => places.forEach((place) => (element(place).textContent = shown(value)));
    const told = await generate(asked, own, signal, drawn, speed);
    element(`text-${side}`).textContent = told.text;
    texts[side] = told.text;
  }
  element("verdict").textContent = texts.on === texts.off ? "identical: yes" : `identical: no${excuse()}`;
}

// Rounding depends on how many tokens one forward has: ties may part in less than float32.
function excuse() {
  return dtype === "float32" ? "" : ` (promised in float32; this target computes in ${dtype}, where equal tokens may part)`;
}

// Load

let last = null;
let dtype = "float32";

async function poll() {
  const state = await getJson("/specdecode/state");
  const [target] = state.targets;
  const model = target?.model ?? "no model yet";
  dtype = target?.dtype ?? dtype;
  element("served").textContent = `${model}, ${dtype}, version ${state.version}${target?.connected ? "" : ", no target is connected"}`;
  offer(state.drafts.flatMap((draft) => draft.drafters));
  const now = { at: performance.now(), ...state.figures };
  if (last && now.num_rounds > last.num_rounds) {
    element("gamma").textContent = ((now.num_drafted - last.num_drafted) / (now.num_rounds - last.num_rounds)).toFixed(2);
    element("throughput").textContent = ((now.num_emitted - last.num_emitted) / ((now.at - last.at) / 1000)).toFixed(0);
  }
  last = now;
  if (target?.load) gauge(target, state.costs);
}

function gauge({ load, num_sequences: sequences }, costs) {
  const inFlight = sequences ? load.tokens_in_flight : 0;
  element("price").textContent = sequences ? load.price.toFixed(3) : "–";
  element("running").textContent = sequences;
  element("flight").textContent = inFlight;
  const ridge = costs?.ridge ?? null;
  element("ridge").textContent = ridge === null ? "not measured" : ridge.toFixed(0);
  const meter = element("flight-meter");
  meter.max = Math.max(2 * (ridge ?? 128), inFlight);
  meter.high = ridge ?? 256;
  meter.value = inFlight;
  if (costs?.tokens.length) element("steps-chart").replaceChildren(stepsChart(costs, inFlight));
}

function offer(drafters) {
  const select = element("drafter");
  if (select.options.length > 1) return;
  for (const drafter of new Set(drafters)) select.append(new Option(drafter, drafter));
}

async function plan() {
  const told = await getJson("/specdecode/plan");
  if (!told.rows.length) {
    element("plan-chart").textContent = "Nothing was measured here (calibration is off).";
    return;
  }
  element("plan-caption").textContent =
    `Throughput by texts at once, as planned with drafter ${told.drafter}; dashed: off; numbers: mean γ`;
  element("plan-chart").replaceChildren(planChart(told.rows));
}

// Again and again while the page is seen; what fails is tried again.
async function repeat(work, milliseconds) {
  for (;;) {
    if (!document.hidden) {
      try {
        await work();
      } catch {
        element("served").textContent = "the router does not answer";
      }
    }
    await new Promise((resolve) => setTimeout(resolve, milliseconds));
  }
}

element("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  run(show);
});
element("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run(show);
});
element("compare").addEventListener("click", () => run(compare));
element("stop").addEventListener("click", () => running?.abort());
element("load").addEventListener("input", () => (element("load-value").textContent = element("load").value));
element("load").addEventListener("change", () => {
  background.set(Number(element("load").value), (error) => {
    say(error.message);
    element("load").value = 0;
    element("load-value").textContent = "0";
  });
});
repeat(poll, POLL_MILLISECONDS);
repeat(plan, PLAN_MILLISECONDS);
