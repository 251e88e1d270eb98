// Tokens and rounds of one text, as they come.

const ORIGINS = ["accepted", "bonus", "recovered", "plain"];
const MOST_ROUNDS = 200;
const SVG = "http://www.w3.org/2000/svg";

export const element = (id) => document.getElementById(id);

export function svg(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export class Text {
  #decoder = new TextDecoder();
  #counts = Object.fromEntries(ORIGINS.map((origin) => [origin, 0]));
  #current = null;

  constructor() {
    this.box = element("text");
    this.box.replaceChildren();
    this.box.onpointerover = (event) => this.#show(event.target.closest("span"));
    this.box.onkeydown = (event) => this.#move(event);
    this.#tell();
  }

  add(tokens) {
    for (const token of tokens) {
      const span = document.createElement("span");
      span.className = token.origin;
      // A character may be spread over several tokens: it is shown with its last byte.
      span.textContent = this.#decoder.decode(new Uint8Array(token.bytes), { stream: true });
      span.dataset.say = describe(token);
      span.title = span.dataset.say;
      this.box.append(span);
      this.#counts[token.origin] += 1;
    }
    this.#tell();
  }

  get total() {
    return ORIGINS.reduce((sum, origin) => sum + this.#counts[origin], 0);
  }

  #tell() {
    for (const place of document.querySelectorAll("#counts [data-origin]")) {
      const origin = place.dataset.origin;
      place.textContent = origin === "all" ? this.total : this.#counts[origin];
    }
  }

  #move(event) {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const spans = [...this.box.children];
    if (!(event.key in steps) || !spans.length) return;
    event.preventDefault();
    const index = spans.indexOf(this.#current) + steps[event.key];
    this.#show(spans[Math.min(Math.max(index, 0), spans.length - 1)]);
  }

  #show(span) {
    if (!span || !span.dataset.say) return;
    this.#current?.classList.remove("current");
    this.#current = span;
    span.classList.add("current");
    element("token").textContent = span.dataset.say;
  }
}

function describe(token) {
  const probability = token.logprob === null ? "" : `, probability ${Math.exp(token.logprob).toFixed(3)}`;
  return `${JSON.stringify(token.text)}: ${token.origin}${probability}, id ${token.id}`;
}

export class Rounds {
  constructor() {
    this.body = element("rounds");
    this.body.replaceChildren();
  }

  add(rounds) {
    for (const round of rounds) this.body.prepend(row(round));
    while (this.body.children.length > MOST_ROUNDS) this.body.lastChild.remove();
  }
}

function row(round) {
  const made = document.createElement("tr");
  const own = round.num_emitted > round.num_accepted;
  const said = `${round.num_drafted} drafted, ${round.num_accepted} accepted${own ? `, then ${round.last_origin}` : ""}`;
  const milliseconds = (seconds) => (seconds * 1000).toFixed(1);
  const predicted = round.predicted_seconds ? `${milliseconds(round.predicted_seconds)} ms` : "no prediction";
  const times = `predicted ${predicted}, took ${milliseconds(round.seconds)} ms`;
  for (const content of [
    `${round.index}`,
    boxes(round, own, said),
    timed(bars(round, times), round),
    round.drafter ?? "–",
    round.reason.replaceAll("_", " "),
  ]) {
    const cell = document.createElement("td");
    cell.append(content);
    made.append(cell);
  }
  return made;
}

function timed(drawn, round) {
  const made = document.createElement("span");
  const numbers = document.createElement("small");
  const [predicted, real] = [round.predicted_seconds, round.seconds].map((value) => (value * 1000).toFixed(0));
  numbers.textContent = ` ${predicted === "0" ? "–" : predicted}, ${real} ms`;
  made.append(drawn, numbers);
  return made;
}

function boxes(round, own, said) {
  const width = 12 * (round.num_drafted + 1) + 2;
  const drawn = svg("svg", { width, height: 14, role: "img", "aria-label": said });
  drawn.append(svg("title", {}, said));
  for (let index = 0; index < round.num_drafted; index += 1) {
    const kept = index < round.num_accepted ? "kept" : "drafted";
    drawn.append(svg("rect", { x: 12 * index + 1, y: 2, width: 9, height: 9, rx: 2, class: kept }));
  }
  if (own) {
    const x = 12 * round.num_drafted + 6;
    drawn.append(svg("circle", { cx: x, cy: 6.5, r: 5, class: `own-${round.last_origin}` }));
  }
  return drawn;
}

function bars(round, said) {
  const scale = (seconds) => Math.min(seconds * 600, 100);
  const drawn = svg("svg", { width: 102, height: 14, role: "img", "aria-label": said });
  drawn.append(svg("title", {}, said));
  drawn.append(svg("rect", { x: 0, y: 1, width: scale(round.predicted_seconds), height: 5, class: "predicted" }));
  drawn.append(svg("rect", { x: 0, y: 7, width: scale(round.seconds), height: 5, class: "real" }));
  return drawn;
}
