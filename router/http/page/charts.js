// Two line charts: what steps cost, and what is planned.

import { svg } from "./view.js";

const WIDTH = 420;
const HEIGHT = 200;
const LEFT = 44;
const BOTTOM = 26;

function scales(xs, ys) {
  const least = Math.log2(Math.min(...xs));
  const span = Math.log2(Math.max(...xs)) - least || 1;
  const top = Math.max(...ys) * 1.08;
  return {
    x: (value) => LEFT + ((Math.log2(Math.max(value, 1)) - least) / span) * (WIDTH - LEFT - 12),
    y: (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - BOTTOM - 12),
    top,
  };
}

function frame({ x, y, top }, xs, unit, said) {
  const chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: "100%", role: "img", "aria-label": said });
  chart.append(svg("title", {}, said));
  chart.append(svg("line", { x1: LEFT, x2: WIDTH, y1: y(0), y2: y(0), class: "axis" }));
  let last = -Infinity;
  for (const value of xs) {
    if (x(value) - last < 26) continue;
    last = x(value);
    chart.append(svg("text", { x: last, y: HEIGHT - 8, "text-anchor": "middle" }, `${value}`));
  }
  for (const share of [0.5, 1]) {
    const value = (top / 1.08) * share;
    chart.append(svg("text", { x: LEFT - 4, y: y(value) + 4, "text-anchor": "end" }, value.toFixed(value < 10 ? 1 : 0)));
  }
  chart.append(svg("text", { x: 2, y: 10 }, unit));
  return chart;
}

const path = (scale, xs, ys) => ({ points: xs.map((value, index) => `${scale.x(value)},${scale.y(ys[index])}`).join(" ") });

export function stepsChart(costs, tokensInFlight) {
  const milliseconds = costs.seconds.map((value) => value * 1000);
  const scale = scales(costs.tokens, milliseconds);
  const chart = frame(scale, costs.tokens, "ms", "Milliseconds of a step by tokens in flight, with the ridge");
  chart.append(svg("polyline", { ...path(scale, costs.tokens, milliseconds), class: "auto" }));
  if (costs.ridge !== null && costs.ridge <= costs.tokens.at(-1)) {
    const x = scale.x(costs.ridge);
    chart.append(svg("line", { x1: x, x2: x, y1: 8, y2: scale.y(0), class: "ridge" }));
    chart.append(svg("text", { x: x + 4, y: 20 }, `ridge ${costs.ridge.toFixed(0)}`));
  }
  if (tokensInFlight) {
    const near = costs.tokens.reduce((best, value, index) => (value <= tokensInFlight ? index : best), 0);
    chart.append(svg("circle", { cx: scale.x(tokensInFlight), cy: scale.y(milliseconds[near]), r: 5, class: "now" }));
  }
  return chart;
}

export function planChart(rows) {
  const batches = rows.map((row) => row.batch);
  const off = rows.map((row) => row.off);
  const auto = rows.map((row) => row.auto);
  const scale = scales(batches, [...off, ...auto]);
  const chart = frame(scale, batches, "tok/s", "Tokens a second by texts at once: without drafts dashed, as the router drafts solid");
  chart.append(svg("polyline", { ...path(scale, batches, off), class: "off" }));
  chart.append(svg("polyline", { ...path(scale, batches, auto), class: "auto" }));
  rows.forEach((row, index) => {
    const anchor = index ? "middle" : "start";
    const at = { x: scale.x(row.batch), y: scale.y(auto[index]) - 6, "text-anchor": anchor };
    chart.append(svg("text", at, row.num_draft_tokens.toFixed(1)));
  });
  return chart;
}
