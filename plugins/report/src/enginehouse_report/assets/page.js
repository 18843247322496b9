"use strict";
// The page of runs. Data come in parts: a report has one, in blocks of the page; `enginehouse watch` sends what is new.
// All texts of a run are set as text, never as markup.

// ---------------------------------------------------------------- small things

const $ = (id) => document.getElementById(id);
const LIVE = document.documentElement.dataset.live;
const PALETTE = 8;
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [4, 4]];

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

function variable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const color = (place) => variable(`--c${place % PALETTE}`);

function figure(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
  const size = Math.abs(value);
  return size >= 0.01 && size < 1e5 ? String(Number(value.toPrecision(4))) : value.toExponential(2);
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 60) return `${figure(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min ${Math.floor(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

const count = (number, what) => `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;

function trouble(text) {
  $("trouble").textContent = text;
  $("trouble").hidden = !text;
}

// ---------------------------------------------------------------- tables of columns that grow

function newTable() {
  return { rows: 0, columns: new Map(), notFinite: new Map(), binned: 0 };
}

function append(table, part) {
  const columns = new Map(Object.entries(part.columns));
  for (const name of columns.keys()) {
    if (!table.columns.has(name)) table.columns.set(name, new Array(table.rows).fill(null));
  }
  for (const [name, values] of table.columns) {
    const more = columns.get(name);
    for (let row = 0; row < part.rows; row += 1) values.push(more ? more[row] : null);
  }
  for (const [name, places] of Object.entries(part.not_finite || {})) {
    const known = table.notFinite.get(name) || new Set();
    for (const place of places) known.add(place + table.rows);
    table.notFinite.set(name, known);
  }
  table.binned = Math.max(table.binned, part.binned || 0);
  table.rows += part.rows;
}

// ---------------------------------------------------------------- where data come from

async function unpack(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let at = 0; at < binary.length; at += 1) bytes[at] = binary.charCodeAt(at);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

const unpacked = new Map();

function block(name) {
  if (!unpacked.has(name)) unpacked.set(name, unpack($(`block-${name}`).textContent));
  return unpacked.get(name);
}

async function ask(what) {
  const answer = await fetch(`${LIVE}${what}`, { cache: "no-store" });
  if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
  return answer.json();
}

function timelineOf(number) {
  return LIVE ? ask("timeline") : block(`timeline-${number}`);
}

async function wholeRow(number, samples, row) {
  const at = (name) => samples.columns.get(name)?.[row];
  if (LIVE) return ask(`sample?file=${fileOf(samples, row)}&line=${at("line")}`);
  const place = at("block");
  return place === null || place === undefined ? null : (await block(`rows-${number}-${place}`))[at("at")];
}

function fileOf(samples, row) {
  const kind = samples.columns.get("kind")[row] ? "validation" : "step";
  return `${kind}-${String(samples.columns.get("step")[row]).padStart(6, "0")}.jsonl`;
}

// ---------------------------------------------------------------- what is shown

const state = { runs: [], main: null, smoothing: 0, log: false, zoom: null, charts: [], timelines: [], cursors: null };

function newRun(part) {
  return { part, metrics: newTable(), validations: newTable(), samples: newTable(), unread: [], damaged: 0 };
}

function take(run, part) {
  run.part = { ...part };
  append(run.metrics, part.metrics);
  append(run.validations, part.validations);
}

function takeSamples(run, part) {
  append(run.samples, part);
  run.unread = part.unread;
  run.damaged = part.damaged;
}

const HIDDEN_COLUMNS = new Set(["step", "elapsed_seconds"]);

function metricNames() {
  const names = new Set();
  for (const run of state.runs) {
    for (const table of [run.metrics, run.validations]) for (const name of table.columns.keys()) names.add(name);
  }
  return [...names].filter((name) => !HIDDEN_COLUMNS.has(name));
}

function seriesOf(run, name) {
  const table = run.metrics.columns.has(name) ? run.metrics : run.validations;
  const values = table.columns.get(name);
  return values ? { x: table.columns.get("step"), y: values, holes: table.notFinite.get(name) } : null;
}

// ---------------------------------------------------------------- which charts

const CHARTS = [
  { id: "reward", title: "Reward", about: "mean of a step's episodes, around it a standard deviation, within lowest and highest; and on held-out prompts",
    pick: /^(reward\/mean|validation\/(.*\/)?reward)$/, band: ["reward/mean", "reward/std", "reward/min", "reward/max"] },
  { id: "reward-figures", title: "The reward's own figures", about: "means of a step", pick: /^reward\/(?!mean$|std$|max$|min$|groups_all_equal$|failures$)/ },
  { id: "validation", title: "Validation", about: "further figures of held-out prompts", pick: /^validation\/(?!(.*\/)?(reward|tokens_mean|truncated|loss|accuracy|failures|dropped)$|rewards\/|.*_stderr$)/ },
  { id: "equal", title: "Groups whose rewards all agree", about: "share; nothing is learned from them", pick: /^reward\/groups_all_equal$/ },
  { id: "kl", title: "KL", about: "nats a token: to the reference, and to the policy that drew", pick: /^(?!mismatch\/)(.*\/)?(policy_)?kl$/ },
  { id: "entropy", title: "Entropy", about: "nats a token", pick: /^(?!mismatch\/)(.*\/)?entropy$/ },
  { id: "clip", title: "Clipped tokens", about: "share of tokens whose ratio the loss clips", pick: /(^|\/)clip_fraction$/ },
  { id: "mismatch", title: "Mismatch: KL, by age of the weights", about: "of the actor from the rollout, nats a token; behind_N: drawn N versions ago",
    pick: /^mismatch\/(behind_\d+\/)?kl$/ },
  { id: "mismatch-ratio", title: "Mismatch: ratios", about: "of a token and of a response, 1 where engines agree", pick: /^mismatch\/(behind_\d+\/)?(sequence_)?ratio$/ },
  { id: "mismatch-size", title: "Mismatch: logprobs apart", about: "nats, mean and largest of a step", pick: /^mismatch\/absolute_(mean|max)$/ },
  { id: "lengths", title: "Response lengths", about: "tokens", pick: /^(response\/tokens_(mean|max)|validation\/(.*\/)?tokens_mean)$/ },
  { id: "stopped", title: "Responses that ended by themselves", about: "share of a step's; truncated: those that were cut at max_tokens", pick: /^(response\/(stopped|truncated)|validation\/(.*\/)?truncated)$/ },
  { id: "staleness", title: "Staleness", about: "versions that a sample's first token is behind", pick: /^staleness\// },
  { id: "loss", title: "Loss", about: "of each role", pick: /^(.*\/)?loss$/ },
  { id: "grad", title: "Gradient norm", about: "of each role, before clipping", pick: /^(.*\/)?grad_norm$/ },
  { id: "lr", title: "Learning rate", about: "of each role", pick: /^(.*\/)?lr$/ },
  { id: "preferences", title: "Preferences", about: "accuracy and margins of pairs", pick: /^(validation\/)?(accuracy|margin|rewards\/.*)$/ },
  { id: "phases", title: "Seconds of a step, by phase", about: "stacked; the line is the whole step", pick: /^time\/(?!step$)/, stacked: "time/step" },
  { id: "busy", title: "Who worked, and who waited", about: "share of the step in which an engine worked; the rest it waited for others", pick: /^busy\//, over: "time/step" },
  { id: "tokens", title: "Tokens a second", about: "of all a step trained on", pick: /^tokens_per_second$/ },
  { id: "memory", title: "Memory", about: "as the run reports it", pick: /memory|(^|_)gib($|_)|_bytes$/ },
  { id: "replicas", title: "Replicas", about: "that serve", pick: /^rollout\/replicas$/ },
  { id: "utilisation", title: "Rollout in use", about: "share of the time that replicas had work", pick: /^rollout\/utilisation$/ },
  { id: "slow", title: "The slowest replica", about: "how many times as long as the others it takes", pick: /^rollout\/slowest$/ },
  { id: "failures", title: "Restarts and failures", about: "of replicas, rewards, episodes and optimizer steps",
    pick: /^(rollout\/(restarts|retries)|(reward|validation)\/(.*\/)?failures|feed\/failed_.*|(.*\/)?skipped)$/, quietAtZero: true },
  { id: "episodes", title: "Episodes", about: "of an environment", pick: /^episode\// },
  { id: "queue", title: "Waiting requests and episodes", about: "at the end of a step", pick: /^(rollout\/queued|feed\/(under_way|left_over))$/ },
];

const ALARM_CHARTS = {
  entropy_collapse: "entropy", kl_runaway: "kl", reward_all_equal: "equal", reward_zero: "reward", responses_cut: "stopped",
  mismatch_growing: "mismatch", engines_apart: "mismatch-size", off_policy: "staleness", replica_slow: "slow",
  controller_bound: "phases", steps_skipped: "failures", no_token_counted: "failures", gradient_zero: "grad",
};

// ---------------------------------------------------------------- the data of a chart

function linesOf(spec) {
  const names = spec.names || metricNames().filter((name) => spec.pick.test(name));
  const lines = [];
  names.forEach((name, nth) => {
    state.runs.forEach((run, number) => {
      const found = seriesOf(run, name);
      if (!found) return;
      const many = state.runs.length > 1;
      lines.push({ run, name, label: many ? `${run.part.name}: ${name}` : name, place: many ? number : nth, nth, ...found });
    });
  });
  return lines.slice(0, spec.most || 24);
}

function over(line, divisor) {
  const below = seriesOf(line.run, divisor);
  if (!below) return line;
  return { ...line, y: line.y.map((value, at) => (value === null || !below.y[at] ? null : value / below.y[at])) };
}

// Gaps are what is no finite number; where a line has no point, the line goes on: that is undefined to uPlot.
function drawn(line, log) {
  return line.y.map((value, at) => {
    if (value === null) return line.holes?.has(at) ? null : undefined;
    return log && value <= 0 ? null : value;
  });
}

// An exponential mean over about `steps` steps, from its first value on without a pull to 0.
function smoothed(values, steps) {
  if (!steps) return values;
  const keep = 1 - 2 / (steps + 1);
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = keep * sum + (1 - keep) * value;
    weight = keep * weight + 1 - keep;
    return sum / weight;
  });
}

function joined(lines) {
  const [first] = lines;
  if (lines.every((line) => line.x === first.x)) return [first.x, ...lines.map((line) => line.values)];
  return uPlot.join(lines.map((line) => [line.x, line.values]));
}

function prepared(spec, log) {
  let lines = linesOf(spec);
  if (spec.over) lines = lines.map((line) => over(line, spec.over));
  const stacked = spec.stacked && state.runs.length === 1;
  for (const line of lines) {
    line.raw = drawn(line, log && !stacked);
    line.values = smoothed(line.raw, state.smoothing);
    line.shown = line.values;
  }
  return lines;
}

function stack(lines) {
  const sums = new Array(lines[0].values.length).fill(0);
  for (const line of lines) line.values = line.values.map((value, at) => (sums[at] += value || 0));
}

// ---------------------------------------------------------------- a chart

class Chart {
  constructor(spec, grid) {
    this.spec = spec;
    this.log = false;
    this.off = new Set();
    this.plot = null;
    this.visible = false;
    this.dirty = true;
    this.box = make("div", { class: "plot", tabindex: 0, role: "img" });
    this.keys = make("ul", { class: "keys" });
    this.logButton = make("button", { type: "button", "aria-pressed": "false", onclick: () => this.toggleLog() }, "log");
    this.about = make("p", { class: "about" });
    this.element = make("figure", { class: "chart", id: `chart-${spec.id}` },
      make("figcaption", {}, make("h3", {}, spec.title), this.logButton), this.about, this.box, this.keys);
    this.box.addEventListener("keydown", (event) => this.move(event));
    grid.append(this.element);
    watcher.observe(this.element);
    this.element.chart = this;
  }

  toggleLog() {
    this.log = !this.log;
    this.logButton.setAttribute("aria-pressed", String(this.log));
    this.refresh();
  }

  refresh() {
    this.dirty = true;
    if (this.visible) this.draw();
  }

  get logarithmic() {
    return (this.log !== state.log) && !(this.spec.stacked && state.runs.length === 1);
  }

  draw() {
    if (!this.dirty) return;
    this.dirty = false;
    const lines = prepared(this.spec, this.logarithmic);
    this.empty = !lines.some((line) => line.y.some((value) => value !== null));
    this.hide();
    if (this.empty) return;
    this.lines = lines;
    this.describe();
    if (this.spec.quietAtZero && lines.every((line) => line.y.every((value) => !value))) {
      this.quiet();
      return;
    }
    this.box.hidden = false;
    this.show();
  }

  hide(asked = this.asked) {
    this.asked = asked;
    this.element.hidden = Boolean(asked || this.empty);
  }

  quiet() {
    this.plot?.destroy();
    this.plot = null;
    this.box.hidden = true;
    this.keys.replaceChildren(make("li", { class: "good" }, "None in any step."));
  }

  describe() {
    const { lines, spec } = this;
    const notes = [spec.about || ""];
    const holes = lines.reduce((sum, line) => sum + (line.holes?.size || 0), 0);
    if (holes) notes.push(`${count(holes, "value")} ${holes === 1 ? "is" : "are"} no finite number (gaps)`);
    if (this.logarithmic) {
      const below = lines.reduce((sum, line) => sum + line.y.filter((value) => value !== null && value <= 0).length, 0);
      if (below) notes.push(`${count(below, "value")} of 0 or below not drawn on a log scale`);
    }
    if (state.smoothing) notes.push(`means over about ${state.smoothing} steps`);
    this.about.textContent = notes.filter(Boolean).join("; ");
    const said = lines.slice(0, 6).map((line) => `${line.label} ${figure(lastOf(line.y))}`);
    this.box.setAttribute("aria-label", `${spec.title}. Last values: ${said.join(", ")}. Arrow keys move through the steps.`);
  }

  show() {
    const stacked = this.spec.stacked && state.runs.length === 1;
    const lines = this.lines.map((line) => ({ ...line }));
    if (stacked) stack(lines);
    const extra = stacked ? this.total() : this.band();
    const shade = !stacked && state.smoothing && lines.length <= 4 ? lines.map((line) => ({ ...line, values: line.raw, faint: true })) : [];
    const all = [...lines, ...extra, ...shade];
    const signature = JSON.stringify([all.map((line) => [line.label, line.faint]), this.logarithmic, theme(), this.box.clientWidth]);
    const data = joined(all);
    if (this.plot && signature === this.signature) {
      this.plot.setData(data, !state.zoom);
    } else {
      this.plot?.destroy();
      this.plot = new uPlot(this.options(all, stacked, extra), data, this.box);
      this.signature = signature;
    }
    if (state.zoom) this.plot.setScale("x", state.zoom);
    this.showKeys();
  }

  band() {
    const { band } = this.spec;
    if (!band || state.runs.length > 1) return [];
    const [mean, spread, lowest, highest] = band.map((name) => seriesOf(state.runs[0], name));
    if (!mean || !spread) return [];
    const within = (value, at) => Math.max(Math.min(value, highest?.y[at] ?? Infinity), lowest?.y[at] ?? -Infinity);
    return [1, -1].map((sign) => {
      const y = mean.y.map((value, at) => (value === null || spread.y[at] === null ? null : within(value + sign * spread.y[at], at)));
      const raw = drawn({ y }, this.logarithmic);
      return { label: `${sign}`, x: mean.x, y, values: smoothed(raw, state.smoothing), edge: true, place: 0 };
    });
  }

  total() {
    const found = seriesOf(state.runs[0], this.spec.stacked);
    return found ? [{ label: this.spec.stacked, ...found, values: smoothed(drawn(found, false), state.smoothing), whole: true }] : [];
  }

  options(lines, stacked, extra) {
    const series = [{}, ...lines.map((line) => this.seriesOptions(line, stacked))];
    const bands = [];
    if (stacked) {
      for (let at = this.lines.length; at > 1; at -= 1) bands.push({ series: [at, at - 1], fill: `${color(this.lines[at - 1].place)}66` });
    } else if (extra.length === 2) {
      const first = this.lines.length + 1;
      bands.push({ series: [first, first + 1], fill: `${color(0)}22` });
    }
    return {
      width: Math.max(this.box.clientWidth, 50), height: 190, series, bands, padding: [8, 16, 0, 0],
      legend: { show: false },
      cursor: { y: false, sync: { key: "steps", setSeries: false, scales: ["x", null] }, points: { size: 6 } },
      scales: { x: { time: false }, y: this.logarithmic ? { distr: 3 } : { range: rangeOf } },
      axes: [this.axis(true), this.axis(false)],
      hooks: {
        setCursor: [() => this.tell()],
        setSelect: [(plot) => zoomTo(plot)],
        draw: [(plot) => this.mark(plot)],
      },
    };
  }

  seriesOptions(line, stacked) {
    if (line.edge) return { label: line.label, stroke: "transparent", width: 0, points: { show: false } };
    if (line.whole) return { label: line.label, stroke: variable("--text"), width: 1, points: { show: false } };
    const stroke = color(line.place);
    const few = line.values.filter((value) => value !== null && value !== undefined).length < 40;
    const base = { label: line.label, show: !this.off.has(line.label), points: { show: !line.faint && few && !stacked, size: 5 } };
    if (line.faint) return { ...base, stroke: `${stroke}55`, width: 1 };
    if (stacked) return { ...base, stroke, width: 1, fill: line.nth === 0 ? `${stroke}66` : undefined };
    return { ...base, stroke, width: 1.6, dash: DASHES[line.nth % DASHES.length] };
  }

  axis(below) {
    const axis = {
      stroke: variable("--faint"), font: "11px system-ui, sans-serif", grid: { stroke: variable("--grid"), width: 1 },
      ticks: { show: false }, size: below ? 26 : 58, gap: 4,
    };
    const values = (plot, ticks) => ticks.map((tick) => (tick === null ? "" : below ? String(tick) : axisFigure(tick)));
    return below ? { ...axis, values, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6] } : { ...axis, values };
  }

  mark(plot) {
    const context = plot.ctx;
    for (const run of state.runs) {
      for (const alarm of run.part.alarms) {
        if (ALARM_CHARTS[alarm.alarm] !== this.spec.id || alarm.step === null) continue;
        const at = plot.valToPos(alarm.step, "x", true);
        if (at < plot.bbox.left || at > plot.bbox.left + plot.bbox.width) continue;
        context.save();
        context.strokeStyle = variable("--warn");
        context.setLineDash([4, 4]);
        context.lineWidth = 2;
        context.beginPath();
        context.moveTo(at, plot.bbox.top);
        context.lineTo(at, plot.bbox.top + plot.bbox.height);
        context.stroke();
        context.restore();
      }
    }
  }

  showKeys() {
    this.outputs = this.lines.map(() => make("output", {}));
    this.keys.replaceChildren(...this.lines.map((line, at) => {
      const button = make("button", { type: "button", "aria-pressed": String(!this.off.has(line.label)) }, swatch(line), line.label, this.outputs[at]);
      button.addEventListener("click", () => this.toggle(line, at, button));
      return make("li", {}, button);
    }));
    this.tell();
  }

  toggle(line, at, button) {
    const show = this.off.has(line.label);
    if (show) this.off.delete(line.label);
    else this.off.add(line.label);
    button.setAttribute("aria-pressed", String(show));
    this.plot.setSeries(at + 1, { show });
  }

  tell() {
    if (!this.plot || !this.outputs) return;
    const at = this.plot.cursor.idx;
    const step = at === null || at === undefined ? null : this.plot.data[0][at];
    this.lines.forEach((line, nth) => {
      const value = step === null ? lastOf(line.shown) : valueAt(line, step);
      this.outputs[nth].textContent = figure(value);
    });
    this.logButton.title = step === null ? "" : `step ${step}`;
    showStep(step);
  }

  move(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1, PageDown: 20, PageUp: -20 }[event.key];
    if (!by || !this.plot) return;
    event.preventDefault();
    const steps = this.plot.data[0];
    const now = this.plot.cursor.idx ?? (by > 0 ? -1 : steps.length);
    const next = Math.min(Math.max(now + by, 0), steps.length - 1);
    this.plot.setCursor({ left: this.plot.valToPos(steps[next], "x"), top: 10 }, true, true);
  }
}

// As uPlot's own, but for a line that is flat: that is drawn in the middle of its value's surroundings.
function rangeOf(plot, low, high) {
  if (low === null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, low + Math.abs(low) * 0.1];
  return uPlot.rangeNum(low, high, 0.1, true);
}

function axisFigure(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e4 || size < 1e-3) return value.toExponential(1).replace(".0e", "e").replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

function swatch(line) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [name, value] of [["width", 22], ["height", 8], ["aria-hidden", "true"]]) svg.setAttribute(name, value);
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  for (const [name, value] of [["d", "M0 4H22"], ["stroke-width", 3], ["stroke", `var(--c${line.place % PALETTE})`]]) path.setAttribute(name, value);
  path.setAttribute("stroke-dasharray", DASHES[line.nth % DASHES.length].join(" "));
  svg.append(path);
  return svg;
}

function lastOf(values) {
  for (let at = values.length - 1; at >= 0; at -= 1) if (values[at] !== null && values[at] !== undefined) return values[at];
  return null;
}

function valueAt(line, step) {
  let low = 0;
  let high = line.x.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (line.x[middle] < step) low = middle + 1;
    else high = middle;
  }
  return line.x[low] === step ? line.shown[low] : null;
}

function showStep(step) {
  const hint = $("charts-hint");
  hint.textContent = step === null ? hint.dataset.said : `Step ${step}. ${hint.dataset.said}`;
}

function zoomTo(plot) {
  if (plot.select.width < 4) return;
  const min = plot.posToVal(plot.select.left, "x");
  const max = plot.posToVal(plot.select.left + plot.select.width, "x");
  zoom(max > min ? { min, max } : null);
}

function zoom(range) {
  state.zoom = range;
  $("unzoom").hidden = range === null;
  for (const chart of state.charts) {
    if (!chart.plot) continue;
    const steps = chart.plot.data[0];
    chart.plot.setScale("x", range || { min: steps[0], max: steps[steps.length - 1] });
  }
}

const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const { chart } = entry.target;
    chart.visible = entry.isIntersecting;
    if (chart.visible) chart.draw();
  }
}, { rootMargin: "400px" });

function refreshCharts() {
  for (const chart of state.charts) chart.refresh();
}

function makeCharts() {
  for (const spec of CHARTS) {
    const known = state.charts.some((chart) => chart.spec === spec);
    if (!known && metricNames().some((name) => spec.pick.test(name))) state.charts.push(new Chart(spec, $("chart-grid")));
  }
  const order = state.charts.filter((chart) => CHARTS.includes(chart.spec)).sort((a, b) => CHARTS.indexOf(a.spec) - CHARTS.indexOf(b.spec));
  if (order.some((chart, at) => $("chart-grid").children[at] !== chart.element)) $("chart-grid").append(...order.map((chart) => chart.element));
  const hint = $("charts-hint");
  const binned = state.runs.map((run) => run.metrics.binned).filter(Boolean);
  const said = ["Pointing at one chart points at all; drag to zoom. Lines are what was logged, unless a mean is chosen above."];
  if (binned.length) said.push(`A long run: of each ${Math.max(...binned)} steps only the lowest and the highest value are in this page; metrics.jsonl has all.`);
  hint.dataset.said = state.charts.length ? said.join(" ") : "No metrics yet.";
  hint.textContent = hint.dataset.said;
}

// ---------------------------------------------------------------- all metrics

const everyMetric = new Map();
const MOST_SHOWN = 400;

function showMetrics() {
  const words = $("metrics-search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const names = metricNames().sort();
  const found = names.filter((name) => words.every((word) => name.toLowerCase().includes(word)));
  $("metrics-count").textContent = `${found.length} of ${names.length}`;
  const wanted = new Set(found.slice(0, MOST_SHOWN));
  for (const name of wanted) {
    if (everyMetric.has(name)) continue;
    const chart = new Chart({ id: `metric-${everyMetric.size}`, title: name, names: [name] }, $("metrics-grid"));
    everyMetric.set(name, chart);
    state.charts.push(chart);
  }
  for (const [name, chart] of everyMetric) chart.hide(!wanted.has(name));
}

// ---------------------------------------------------------------- the run in words

const STATUS = { finished: "good", running: "", interrupted: "warn", killed: "bad", failed: "bad" };

function showOverview() {
  const box = $("overview");
  const cards = state.runs.map((run, number) => runCard(run, number));
  box.replaceChildren(make("div", { class: "runs" }, ...cards), alarmList());
}

function runCard(run, number) {
  const { facts } = run.part;
  const title = make("h1", {}, state.runs.length > 1 ? runSwatch(number) : "", run.part.name, " ",
    make("span", { class: `status ${STATUS[facts.status] || ""}` }, facts.status));
  return make("article", {}, title, factList(run), ...errorOf(run.part));
}

function runSwatch(number) {
  const mark = make("span", { class: "swatch" });
  mark.style.borderTopColor = `var(--c${number % PALETTE})`;
  return mark;
}

function factList(run) {
  const { facts, versions, path } = run.part;
  const last = lastOf(run.metrics.columns.get("step") || []);
  const steps = facts.steps ?? last;
  const rows = [
    ["state", facts.said],
    ["steps", steps === null || steps === undefined ? "" : `${steps}${facts.of_steps ? ` of ${facts.of_steps}` : ""}`],
    ["took", [facts.seconds === null ? "" : (facts.at_least ? "at least " : "") + duration(facts.seconds), facts.started && `${facts.resumed ? "its last process " : ""}from ${facts.started}`].filter(Boolean).join(", ")],
    ["resumed", facts.resumed ? `${facts.resumed === 1 ? "once" : `${facts.resumed} times`}, the last time after step ${facts.resumed_after}` : ""],
    ["command", facts.command],
    ["model", facts.model],
    ["algorithm", facts.algorithm],
    ["best", facts.best ? `${facts.best.metric} ${figure(facts.best.value)} at step ${facts.best.step}` : ""],
    ...facts.engines.map((one) => [one.role, engineWords(one)]),
    ["versions", Object.entries(versions).filter(([name]) => /^(enginehouse|torch|ray|python|vllm|sglang)$/.test(name)).map((pair) => pair.join(" ")).join(", ")],
    ["directory", `${path}${facts.host ? ` on ${facts.host}` : ""}`],
  ];
  return make("dl", { class: "facts" }, ...rows.filter((row) => row[1]).flatMap(([name, said]) => [make("dt", {}, name), make("dd", {}, String(said))]));
}

function engineWords(one) {
  const mesh = one.mesh ? Object.entries(one.mesh).filter(([, size]) => size > 1).map(([name, size]) => `${name} ${size}`).join(", ") : "";
  const engine = one.backend && !one.engine.startsWith(one.backend) ? `${one.backend} (${one.engine})` : one.engine || one.backend;
  const many = one.processes > 1 || one.nodes > 1 ? `${count(one.processes, "process").replace("processs", "processes")} on ${count(one.nodes, "node")}` : "one process";
  return [engine, one.device, many, mesh, one.runtime && one.runtime !== "current" ? `runtime ${one.runtime}` : ""].filter(Boolean).join(", ");
}

function errorOf(part) {
  const shown = [];
  if (part.facts.error) shown.push(make("pre", { class: "bad" }, part.facts.error));
  if (part.error) shown.push(make("details", {}, make("summary", {}, "traceback"), make("pre", {}, part.error)));
  return shown;
}

function alarmList() {
  const items = state.runs.flatMap((run) => run.part.alarms.map((alarm) => alarmItem(run, alarm)));
  return items.length ? make("ul", { class: "alarms", "aria-label": "Alarms" }, ...items) : make("p", { class: "hint" }, "No alarms.");
}

function alarmItem(run, alarm) {
  const chart = ALARM_CHARTS[alarm.alarm];
  const where = alarm.step === null ? "" : `step ${alarm.step}: `;
  const of = state.runs.length > 1 ? `${run.part.name}, ` : "";
  return make("li", {},
    make("strong", {}, `${of}${where}${(alarm.alarm || "alarm").replaceAll("_", " ")}`), make("div", {}, alarm.said),
    alarm.advice ? make("div", {}, make("em", {}, "Try: "), alarm.advice) : "",
    chart && state.charts.some((one) => one.spec.id === chart) ? make("a", { href: `#chart-${chart}` }, "see the chart") : "");
}

// ---------------------------------------------------------------- config and versions

function showConfig() {
  const box = $("config-body");
  const { differing } = state.main;
  const parts = state.runs.map((run) => run.part);
  const shown = JSON.stringify([differing, parts.map((part) => [part.name, part.config, part.config_problem, part.versions])]);
  if (shown === box.dataset.shown) return; // what a reader has opened stays open
  box.dataset.shown = shown;
  const children = [];
  if (parts.length > 1) {
    children.push(make("h3", {}, "What differs in the configs"), pairs(differing.config, parts, "The configs are the same."));
    children.push(make("h3", {}, "What differs in the versions"), pairs(differing.versions, parts, "The versions are the same."));
  }
  for (const part of parts) {
    if (part.config_problem) children.push(make("p", { class: "warn" }, `${part.name}: ${part.config_problem}`));
  }
  const keys = [...new Set(parts.flatMap((part) => Object.keys(part.config)))].sort();
  const whole = Object.fromEntries(keys.map((key) => [key, parts.map((part) => (Object.hasOwn(part.config, key) ? part.config[key] : null))]));
  children.push(make("details", {}, make("summary", {}, `the whole config, ${count(keys.length, "key")}`), pairs(whole, parts, "")));
  const packages = [...new Set(parts.flatMap((part) => Object.keys(part.versions)))].sort();
  const versions = Object.fromEntries(packages.map((name) => [name, parts.map((part) => part.versions[name])]));
  children.push(make("details", {}, make("summary", {}, "versions"), pairs(versions, parts, "")));
  box.replaceChildren(...children);
}

function pairs(rows, parts, none) {
  const entries = Object.entries(rows);
  if (!entries.length) return make("p", { class: "hint" }, none);
  const head = make("tr", {}, make("th", { scope: "col" }, "key"), ...parts.map((part) => make("th", { scope: "col" }, part.name)));
  const said = (value) => (value === null || value === undefined ? "–" : String(value));
  const body = entries.map(([key, values]) => make("tr", {}, make("th", { scope: "row" }, key), ...values.map((value) => make("td", {}, said(value)))));
  return make("div", { class: "wide" }, make("table", { class: "plain" }, make("thead", {}, head), make("tbody", {}, ...body)));
}

// ---------------------------------------------------------------- the table of samples

const ROW = 30;
const COLUMNS = [
  { name: "step", width: "3.6rem", number: true },
  { name: "kind", width: "4.6rem", shown: (value) => (value ? "validation" : "step") },
  { name: "reward", width: "4.2rem", number: true },
  { name: "tokens", width: "4rem", number: true },
  { name: "finish", width: "4.4rem" },
  { name: "prompt", width: "17rem" },
  { name: "response", width: "24rem" },
  { name: "turns", width: "3.4rem", number: true },
  { name: "episode", width: "4.6rem", number: true },
  { name: "segment", width: "5rem", number: true },
  { name: "group", width: "4rem", number: true },
  { name: "task", width: "4rem", number: true },
  { name: "failure", width: "12rem" },
];

const FIRST_WHERE_NARROW = ["step", "reward", "response", "prompt"];
const narrow = matchMedia("(max-width: 640px)");

function columnsFor(names) {
  const columns = COLUMNS.filter((column) => names.includes(column.name));
  const figures = names.filter((name) => name.startsWith("reward/")).map((name) => ({ name, width: "7rem", number: true }));
  if (!narrow.matches) return [...columns, ...figures];
  const first = FIRST_WHERE_NARROW.map((name) => columns.find((column) => column.name === name)).filter(Boolean);
  return [...first.map((column) => ({ ...column, width: column.number ? "3.2rem" : "14rem" })), ...columns.filter((column) => !FIRST_WHERE_NARROW.includes(column.name)), ...figures];
}

class SampleTable {
  constructor() {
    this.run = 0;
    this.sort = { name: "step", down: true };
    this.order = new Uint32Array(0);
    this.active = 0;
    this.made = "";
    this.build();
  }

  get samples() {
    return state.runs[this.run].samples;
  }

  build() {
    this.search = make("input", { type: "search", placeholder: "prompt, response, failure", oninput: () => this.later() });
    this.kind = make("select", { onchange: () => this.select() }, ...[["", "all"], ["0", "steps"], ["1", "validations"]].map(([value, said]) => make("option", { value }, said)));
    this.only = make("select", { onchange: () => this.select() }, ...[["", "all rows"], ["failure", "with a failure"], ["whole", "with tokens here"]].map(([value, said]) => make("option", { value }, said)));
    this.which = make("select", { onchange: () => this.choose(Number(this.which.value)) });
    this.found = make("span", { role: "status", class: "faint" });
    $("samples-tools").replaceChildren(
      make("label", {}, "Search ", this.search), make("label", {}, "From ", this.kind), make("label", {}, "Show ", this.only),
      (this.whichLabel = make("label", { hidden: true }, "Run ", this.which)), this.found);
    $("samples-tools").addEventListener("submit", (event) => event.preventDefault());
    this.head = make("div", { class: "head", role: "rowgroup" });
    this.body = make("div", { class: "body", role: "rowgroup" });
    this.box = make("div", { class: "table", role: "grid", "aria-label": "Samples", onscroll: () => this.draw() }, this.head, this.body);
    this.body.addEventListener("keydown", (event) => this.key(event));
    this.body.addEventListener("click", (event) => this.clicked(event));
    new ResizeObserver(() => this.draw()).observe(this.box);
    $("samples-body").replaceChildren(this.box);
  }

  choose(run) {
    this.run = run;
    this.made = "";
    this.refresh();
  }

  refresh() {
    const names = [...this.samples.columns.keys()];
    this.columns = columnsFor(names);
    this.runChoice();
    const made = JSON.stringify(this.columns.map((column) => column.name));
    if (made !== this.made) this.makeHead();
    this.made = made;
    $("samples-hint").textContent = samplesSaid(state.runs[this.run]);
    for (const part of [this.box, $("samples-tools")]) part.hidden = !this.samples.rows;
    this.select();
  }

  runChoice() {
    this.whichLabel.hidden = state.runs.length < 2;
    this.which.replaceChildren(...state.runs.map((run, number) => make("option", { value: number, selected: number === this.run }, run.part.name)));
  }

  makeHead() {
    this.head.replaceChildren(this.row("div", this.columns.map((column) => {
      const button = make("button", { type: "button", onclick: () => this.sortBy(column) }, column.name);
      return make("div", { role: "columnheader", class: column.number ? "number" : "", "data-name": column.name, title: column.name }, button);
    })));
    this.showSort();
  }

  row(tag, cells) {
    const row = make(tag, { class: "row", role: "row" }, ...cells);
    row.style.gridTemplateColumns = this.columns.map((column) => column.width).join(" ");
    return row;
  }

  sortBy(column) {
    this.sort = { name: column.name, down: this.sort.name === column.name ? !this.sort.down : Boolean(column.number) };
    this.showSort();
    this.select();
  }

  showSort() {
    for (const cell of this.head.querySelectorAll("[role=columnheader]")) {
      const on = cell.dataset.name === this.sort.name;
      cell.setAttribute("aria-sort", on ? (this.sort.down ? "descending" : "ascending") : "none");
      cell.firstChild.textContent = cell.dataset.name + (on ? (this.sort.down ? " ▾" : " ▴") : "");
    }
  }

  later() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.select(), 150);
  }

  select() {
    const { columns, rows } = this.samples;
    const at = (name) => columns.get(name);
    const words = this.search.value.toLowerCase();
    const texts = ["prompt", "response", "failure"].map(at).filter(Boolean);
    const chosen = [];
    for (let row = 0; row < rows; row += 1) {
      if (this.kind.value && String(at("kind")[row]) !== this.kind.value) continue;
      if (this.only.value === "failure" && !at("failure")?.[row]) continue;
      if (this.only.value === "whole" && !LIVE && (at("block")?.[row] ?? null) === null) continue;
      if (words && !texts.some((text) => text[row]?.toLowerCase().includes(words))) continue;
      chosen.push(row);
    }
    this.order = Uint32Array.from(chosen);
    const values = at(this.sort.name);
    if (values) this.order.sort(comparing(values, this.sort.down));
    this.found.textContent = `${count(this.order.length, "row")} of ${rows.toLocaleString("en")}`;
    this.active = Math.min(this.active, Math.max(this.order.length - 1, 0));
    this.box.setAttribute("aria-rowcount", this.order.length + 1);
    this.body.style.height = `${this.order.length * ROW}px`;
    this.draw();
  }

  draw() {
    if (!this.columns?.length) return;
    const from = Math.max(Math.floor(this.box.scrollTop / ROW) - 6, 0);
    const to = Math.min(from + Math.ceil(this.box.clientHeight / ROW) + 14, this.order.length);
    const focused = this.body.contains(document.activeElement);
    const rows = [];
    for (let place = from; place < to; place += 1) rows.push(this.bodyRow(place));
    this.body.replaceChildren(...rows);
    if (focused) this.body.querySelector(`[data-place="${this.active}"]`)?.focus({ preventScroll: true });
  }

  bodyRow(place) {
    const row = this.order[place];
    const cells = this.columns.map((column) => {
      const value = this.samples.columns.get(column.name)[row];
      const said = column.shown ? column.shown(value) : typeof value === "number" ? figure(value) : (value ?? "");
      return make("div", { role: "gridcell", class: column.number ? "number" : "" }, oneLine(String(said)));
    });
    const element = this.row("div", cells);
    element.style.top = `${place * ROW}px`;
    element.dataset.place = place;
    element.tabIndex = place === this.active ? 0 : -1;
    element.setAttribute("aria-rowindex", place + 2);
    return element;
  }

  key(event) {
    const page = Math.floor(this.box.clientHeight / ROW) - 2;
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Enter") this.open(this.order[this.active]);
    if (by === undefined) return;
    event.preventDefault();
    this.active = Math.min(Math.max(this.active + by, 0), this.order.length - 1);
    const top = this.active * ROW;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    if (top + 3 * ROW > this.box.scrollTop + this.box.clientHeight) this.box.scrollTop = top + 3 * ROW - this.box.clientHeight;
    this.draw();
    this.body.querySelector(`[data-place="${this.active}"]`)?.focus({ preventScroll: true });
  }

  clicked(event) {
    const element = event.target.closest(".row");
    if (!element) return;
    this.active = Number(element.dataset.place);
    this.open(this.order[this.active]);
  }

  open(row) {
    openSample(this.run, row).catch((error) => trouble(`A sample could not be read: ${error.message}`));
  }
}

function comparing(values, down) {
  const sign = down ? -1 : 1;
  return (a, b) => {
    const [one, other] = [values[a], values[b]];
    if (one === other) return a - b;
    if (one === null || one === undefined) return 1;
    if (other === null || other === undefined) return -1;
    return (one < other ? -1 : 1) * sign;
  };
}

function oneLine(text) {
  return text.replace(/\r?\n/g, "⏎");
}

function samplesSaid(run) {
  const { samples, unread, damaged } = run;
  if (!samples.rows) return "No samples: the run writes some every `train.samples_every` steps.";
  const said = ["Click a row, or press Enter on it, to see it whole. The search looks at what the table has: the beginning and the end of prompts, the beginning of responses."];
  if (!LIVE) {
    const blocks = samples.columns.get("block");
    const whole = blocks.filter((place) => place !== null).length;
    if (whole < samples.rows) {
      said.push(`${count(whole, "row")} of ${samples.rows.toLocaleString("en")} ${whole === 1 ? "is" : "are"} here whole, with tokens: the best and the worst of each file, and the newest. The others are in samples/, and \`enginehouse watch\` shows all.`);
    }
  }
  if (unread.length && LIVE) said.push(`${count(unread.length, "file")} still to be read, older ones.`);
  else if (unread.length) said.push(`Not read, older: ${unread.slice(0, 3).join(", ")}${unread.length > 3 ? ` and ${unread.length - 3} more files` : ""} (\`enginehouse report\` reads up to 100,000 rows, the report at a run's end for some seconds).`);
  if (damaged) said.push(`${count(damaged, "line")} held no row.`);
  return said.join(" ");
}

// ---------------------------------------------------------------- one sample

const SHADES = [["logprob", "logprob"], ["advantage", "advantage"], ["version", "weight version"], ["mask", "who wrote it"], ["", "nothing"]];
let shade = "logprob";

async function openSample(number, row) {
  const dialog = $("sample");
  const { samples } = state.runs[number];
  const whole = await wholeRow(number, samples, row);
  const place = `line ${samples.columns.get("line")[row]} of samples/${fileOf(samples, row)}`;
  const close = make("button", { type: "button", onclick: () => dialog.close() }, "Close");
  const top = make("div", { class: "top tools" }, close, make("span", {}, `Step ${samples.columns.get("step")[row]}, ${place}`));
  const inside = make("div", { class: "inside" });
  dialog.replaceChildren(top, inside);
  if (whole) showWhole(inside, whole);
  else showHead(inside, samples, row, place);
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
}

function showHead(box, samples, row, place) {
  const at = (name) => samples.columns.get(name)?.[row];
  box.append(
    make("p", { class: "warn" }, `Only the beginning is in this page: ${place} has the whole, and \`enginehouse watch\` shows it.`),
    make("h3", {}, "Prompt"), make("pre", {}, at("prompt") || ""), make("h3", {}, "Response"), make("pre", {}, at("response") || ""));
}

function showWhole(box, whole) {
  box.append(rowFacts(whole));
  const tokens = whole.by_token;
  if (tokens) {
    box.append(...tokenView(tokens));
  } else {
    for (const [title, text] of [["Prompt", whole.prompt], ["Response", whole.response]]) {
      box.append(make("h3", {}, title), make("pre", {}, typeof text === "string" ? text : JSON.stringify(text, null, 1) || ""));
    }
    box.append(make("p", { class: "hint" }, "No figures of tokens were written with this row."));
  }
  if (Array.isArray(whole.turns)) box.append(make("h3", {}, "Turns"), turnTable(whole.turns));
}

const TEXTS = new Set(["prompt", "response", "by_token", "turns"]);

function rowFacts(whole) {
  const entries = Object.entries(whole).filter(([name]) => !TEXTS.has(name));
  const said = (value) => (typeof value === "number" ? figure(value) : typeof value === "string" ? value : JSON.stringify(value));
  return make("dl", { class: "facts" }, ...entries.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, said(value) ?? "")]));
}

function turnTable(turns) {
  const rows = turns.filter((turn) => turn && typeof turn === "object");
  const names = [...new Set(rows.flatMap((turn) => Object.keys(turn)))];
  const head = make("tr", {}, make("th", {}, "turn"), ...names.map((name) => make("th", {}, name === "before" ? "seconds before" : name)));
  const said = (value) => (typeof value === "number" ? figure(value) : String(value ?? "–"));
  return make("div", { class: "wide" }, make("table", { class: "plain" }, make("thead", {}, head),
    make("tbody", {}, ...rows.map((turn, at) => make("tr", {}, make("td", {}, String(at + 1)), ...names.map((name) => make("td", {}, said(turn[name]))))))));
}

function tokenView(tokens) {
  const there = SHADES.filter(([name]) => !name || tokens[name]?.some((value) => value !== null));
  if (!there.some(([name]) => name === shade)) shade = there[0][0];
  const choice = make("select", {}, ...there.map(([value, said]) => make("option", { value, selected: value === shade }, said)));
  const said = make("p", { class: "token-said", role: "status" });
  const view = make("div", { class: "tokens", tabindex: 0, "aria-label": "Tokens; arrow keys go through them" });
  const spans = tokens.text.map((text, at) => tokenSpan(text, at, tokens));
  view.append(...spans);
  const key = make("span", { class: "faint" });
  const paint = () => {
    shade = choice.value;
    key.textContent = shadeWords(tokens);
    spans.forEach((span, at) => { span.style.background = background(tokens, at); });
  };
  choice.addEventListener("change", paint);
  paint();
  followTokens(view, spans, tokens, said);
  const policy = (tokens.mask || []).filter((value) => value === 1).length;
  return [make("div", { class: "tools" }, make("label", {}, "Shade by ", choice), key), said,
    view, make("p", { class: "hint" }, `${count(tokens.text.length, "token")}${tokens.mask ? `, ${policy.toLocaleString("en")} drawn by the policy; grey ones are the prompt's and the environment's` : ""}.`)];
}

function tokenSpan(text, at, tokens) {
  const span = make("span", { class: tokens.mask && !tokens.mask[at] ? "other" : "" });
  span.dataset.at = at;
  const [before, ...lines] = text.split("\n");
  span.append(before);
  for (const line of lines) span.append(make("span", { class: "newline", "aria-hidden": "true" }, "⏎"), `\n${line}`);
  if (!text) span.append("\u200b");
  return span;
}

function followTokens(view, spans, tokens, said) {
  let now = -1;
  const tell = (at) => {
    spans[now]?.classList.remove("on");
    now = at;
    spans[now]?.classList.add("on");
    said.textContent = tokenWords(tokens, at);
  };
  said.textContent = "Point at a token, or tap it, to see its figures.";
  const hit = (event) => {
    const at = event.target.closest?.("[data-at]")?.dataset.at;
    if (at !== undefined) tell(Number(at));
  };
  view.addEventListener("pointerover", hit);
  view.addEventListener("click", hit);
  view.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    tell(Math.min(Math.max(now + by, 0), spans.length - 1));
    spans[now].scrollIntoView({ block: "nearest" });
  });
}

function tokenWords(tokens, at) {
  const logprob = tokens.logprob?.[at];
  const words = [`token ${at + 1}: ${JSON.stringify(tokens.text[at])}`];
  if (tokens.mask) words.push(tokens.mask[at] ? "the policy's" : "not the policy's");
  if (logprob !== null && logprob !== undefined) words.push(`logprob ${figure(logprob)} (probability ${figure(Math.exp(logprob))})`);
  for (const name of ["advantage", "version"]) {
    const value = tokens[name]?.[at];
    if (value !== null && value !== undefined) words.push(`${name} ${figure(value)}`);
  }
  return words.join(", ");
}

function shadeWords(tokens) {
  if (shade === "logprob") return "the stronger, the less likely the token was";
  if (shade === "advantage") return `blue above 0, orange below; full at ${figure(largest(tokens.advantage))}`;
  if (shade === "version") return `versions ${[...new Set(tokens.version.filter((value) => value !== null))].join(", ")}, a colour each`;
  return shade === "mask" ? "green: drawn by the policy" : "";
}

const scales = new WeakMap();

function largest(values) {
  if (!scales.has(values)) scales.set(values, values.reduce((most, value) => Math.max(most, Math.abs(value || 0)), 0));
  return scales.get(values);
}

function background(tokens, at) {
  const value = shade ? tokens[shade]?.[at] : null;
  if (value === null || value === undefined) return "";
  const tint = (name, strength) => (strength > 0.01 ? `rgb(var(${name}) / ${(0.6 * Math.min(strength, 1)).toFixed(3)})` : "");
  if (shade === "logprob") return tint("--low", 1 - Math.exp(value));
  if (shade === "advantage") return tint(value < 0 ? "--low" : "--high", Math.abs(value) / (largest(tokens.advantage) || 1));
  if (shade === "mask") return value ? tint("--own", 0.5) : "";
  return `color-mix(in srgb, var(--c${Math.abs(value) % PALETTE}) 35%, transparent)`;
}

// ---------------------------------------------------------------- the timeline

const LANE = 20;

class Timeline {
  constructor(data, run) {
    this.data = data;
    this.run = run;
    this.lanes = this.layOut();
    this.canvas = make("canvas", { tabindex: 0, "aria-label": "Timeline; arrow keys move, plus and minus zoom" });
    this.box = make("div", { class: "lanes" }, this.canvas);
    this.said = make("p", { class: "said", role: "status" }, "Point at a span to see what it is.");
    this.range = make("select", { onchange: () => this.choose() }, ...this.choices().map(([said], at) => make("option", { value: at }, said)));
    const button = (said, label, act) => make("button", { type: "button", "aria-label": label, onclick: act }, said);
    this.tools = make("div", { class: "tools" }, make("label", {}, "Steps ", this.range),
      button("◀", "earlier", () => this.pan(-0.3)), button("▶", "later", () => this.pan(0.3)),
      button("+", "zoom in", () => this.scale(0.5)), button("−", "zoom out", () => this.scale(2)));
    this.listen();
  }

  choices() {
    const { steps } = this.data;
    const called = (step) => (step[0] ? `step ${step[0]}` : "the start");
    const longest = (step) => `${called(step)}, ${duration((step[2] - step[1]) / 1000)}`;
    const runs = [];
    for (const step of steps) {
      const last = runs[runs.length - 1];
      if (last && last[last.length - 1][2] === step[1]) last.push(step);
      else runs.push([step]);
    }
    const groups = runs.filter((run) => run.length > 1).map((run) => [`${called(run[0])} to ${called(run[run.length - 1])}`, run[0][1], run[run.length - 1][2]]);
    const single = steps.length > 400 ? steps.slice(-400) : steps;
    const last = single.slice(-3);
    const first = last.length ? [[`the last ${count(last.length, "step")}`, last[0][1], last[last.length - 1][2]]] : [];
    return (this.found ??= [...first, ...groups, ...single.map((step) => [longest(step), step[1], step[2]])]);
  }

  // Spans within another of their track stand below it.
  layOut() {
    const { columns } = this.data;
    const order = [...columns.begin.keys()].sort((a, b) => columns.begin[a] - columns.begin[b] || columns.length[b] - columns.length[a]);
    const open = new Map();
    this.depth = new Array(order.length).fill(0);
    const deepest = new Map();
    for (const span of order) {
      const track = columns.track[span];
      const ends = (open.get(track) || []).filter((end) => end > columns.begin[span] + 1e-3);
      this.depth[span] = ends.length;
      ends.push(columns.begin[span] + columns.length[span]);
      open.set(track, ends);
      deepest.set(track, Math.max(deepest.get(track) || 0, Math.min(this.depth[span], 5)));
    }
    this.tops = [];
    let top = 0;
    this.data.tracks.forEach((name, track) => {
      this.tops.push(top);
      top += ((deepest.get(track) || 0) + 1) * LANE + 6;
    });
    return top;
  }

  choose() {
    const [, begin, end] = this.choices()[this.range.value];
    this.view = [begin, Math.max(end, begin + 0.01)];
    this.draw();
  }

  pan(share) {
    const by = (this.view[1] - this.view[0]) * share;
    this.view = [this.view[0] + by, this.view[1] + by];
    this.draw();
  }

  scale(factor, at = (this.view[0] + this.view[1]) / 2) {
    this.view = this.view.map((edge) => at + (edge - at) * factor);
    this.draw();
  }

  listen() {
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("click", (event) => this.point(event));
    this.canvas.addEventListener("keydown", (event) => {
      const act = { ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), "+": () => this.scale(0.5), "-": () => this.scale(2) }[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    });
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  get left() {
    return this.box.clientWidth < 600 ? 76 : 130;
  }

  position(at) {
    return this.left + ((at - this.view[0]) / (this.view[1] - this.view[0])) * (this.box.clientWidth - this.left);
  }

  draw() {
    if (!this.view || !this.box.clientWidth) return;
    const width = this.box.clientWidth;
    const height = this.lanes + 24;
    const ratio = devicePixelRatio || 1;
    Object.assign(this.canvas, { width: width * ratio, height: height * ratio });
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    this.drawSteps(context, height);
    this.drawSpans(context, width);
    this.drawNames(context, height);
  }

  drawSteps(context, height) {
    context.strokeStyle = variable("--line");
    context.fillStyle = variable("--faint");
    let free = 0;
    for (const [step, begin] of this.data.steps) {
      const x = this.position(begin);
      if (x < this.left || x > this.box.clientWidth) continue;
      context.beginPath();
      context.moveTo(x, 20);
      context.lineTo(x, height);
      context.stroke();
      const said = step ? `step ${step}` : "start";
      if (x >= free && x + context.measureText(said).width < this.box.clientWidth) {
        context.fillText(said, x + 2, 11);
        free = x + context.measureText(said).width + 8;
      }
    }
  }

  drawSpans(context, width) {
    const { columns, names } = this.data;
    const [begin, end] = this.view;
    const colors = Array.from({ length: PALETTE }, (_, place) => color(place));
    const [ground, neutral] = [variable("--ground"), variable("--faint")];
    for (let span = 0; span < columns.begin.length; span += 1) {
      if (columns.begin[span] > end || columns.begin[span] + columns.length[span] < begin) continue;
      const from = Math.max(this.position(columns.begin[span]), this.left);
      const to = Math.min(this.position(columns.begin[span] + columns.length[span]), width);
      const top = 22 + this.tops[columns.track[span]] + Math.min(this.depth[span], 5) * LANE;
      const said = names[columns.name[span]];
      context.fillStyle = /^step \d+$/.test(said) ? neutral : colors[hashed(said) % PALETTE];
      context.fillRect(from, top, Math.max(to - from - 0.5, 1), LANE - 2);
      if (to - from > 24 && context.measureText(said).width < to - from - 6) {
        context.fillStyle = ground;
        context.fillText(said, from + 3, top + LANE / 2 - 1);
      }
    }
  }

  drawNames(context, height) {
    context.fillStyle = variable("--panel");
    context.fillRect(0, 0, this.left, height);
    context.fillStyle = variable("--text");
    this.data.tracks.forEach((name, track) => {
      context.fillText(name, 6, 22 + this.tops[track] + LANE / 2, this.left - 10);
    });
  }

  point(event) {
    const { columns, names, tracks } = this.data;
    const at = this.view[0] + ((event.offsetX - this.left) / (this.box.clientWidth - this.left)) * (this.view[1] - this.view[0]);
    const slack = ((this.view[1] - this.view[0]) / (this.box.clientWidth - this.left)) * 2;
    for (let span = 0; span < columns.begin.length; span += 1) {
      const top = 22 + this.tops[columns.track[span]] + Math.min(this.depth[span], 5) * LANE;
      if (event.offsetY < top || event.offsetY > top + LANE) continue;
      if (at < columns.begin[span] - slack || at > columns.begin[span] + columns.length[span] + slack) continue;
      const details = Object.entries(columns.details[span] || {}).map(([name, value]) => `${name} ${typeof value === "string" ? value : JSON.stringify(value)}`);
      this.said.textContent = [`${tracks[columns.track[span]]}: ${names[columns.name[span]]}`, duration(columns.length[span] / 1000), `at ${duration(columns.begin[span] / 1000)}`, ...details].join(", ");
      return;
    }
  }
}

// A name has the same colour in all runs.
function hashed(name) {
  let sum = 0;
  for (const character of name) sum = (sum * 31 + character.codePointAt(0)) % 9973;
  return sum;
}

async function showTimelines() {
  const shown = [];
  const made = [];
  for (const number of state.runs.keys()) {
    const data = await timelineOf(number);
    if (!data.steps.length) continue;
    const timeline = new Timeline(data, number);
    if (state.runs.length > 1) shown.push(make("h3", {}, state.runs[number].part.name));
    shown.push(timeline.tools, timeline.box, timeline.said);
    made.push(timeline);
    timelineSaid(data);
  }
  if (LIVE) shown.push(make("button", { type: "button", onclick: () => showTimelines() }, "Read the timeline again"));
  $("timeline-body").replaceChildren(...shown);
  if (!made.length) $("timeline-hint").textContent = "No timeline yet.";
  for (const timeline of made) timeline.choose();
  state.timelines = made;
}

function timelineSaid(data) {
  const spans = data.columns.begin.length;
  const said = ["Spans of the controller, the roles and the longest episodes."];
  if (spans < data.of_spans) {
    said.push(`${spans.toLocaleString("en")} of ${data.of_spans.toLocaleString("en")} spans are here, of ${data.steps.length} of ${data.of_steps} steps (the first, the last, the slowest, then the newest); timeline.json opens whole in https://ui.perfetto.dev.`);
  }
  $("timeline-hint").textContent = said.join(" ");
}

const timelineWatcher = new IntersectionObserver((entries) => {
  if (!entries.some((entry) => entry.isIntersecting)) return;
  timelineWatcher.disconnect();
  showTimelines().catch((error) => trouble(`The timeline could not be read: ${error.message}`));
}, { rootMargin: "600px" });

// ---------------------------------------------------------------- light, dark, tools

const THEMES = ["system", "light", "dark"];
const darkness = matchMedia("(prefers-color-scheme: dark)");

function remembered() {
  try {
    return localStorage.getItem("enginehouse-theme") || "system";
  } catch {
    return "system"; // a page from a file may have no storage
  }
}

let chosenTheme = remembered();

function theme() {
  return chosenTheme === "system" ? (darkness.matches ? "dark" : "light") : chosenTheme;
}

function showTheme() {
  document.documentElement.dataset.theme = theme();
  $("theme").textContent = `Theme: ${chosenTheme}`;
  refreshCharts();
  for (const timeline of state.timelines) timeline.draw();
}

function nextTheme() {
  chosenTheme = THEMES[(THEMES.indexOf(chosenTheme) + 1) % THEMES.length];
  try {
    localStorage.setItem("enginehouse-theme", chosenTheme);
  } catch { /* as above */ }
  showTheme();
}

function listen() {
  darkness.addEventListener("change", showTheme);
  $("theme").addEventListener("click", nextTheme);
  $("smoothing").addEventListener("change", () => { state.smoothing = Number($("smoothing").value); refreshCharts(); });
  $("log").addEventListener("change", () => { state.log = $("log").checked; refreshCharts(); });
  $("unzoom").addEventListener("click", () => zoom(null));
  $("metrics-search").addEventListener("input", showMetrics);
  $("tools").addEventListener("submit", (event) => event.preventDefault());
  $("sample").addEventListener("click", (event) => { if (event.target === $("sample")) $("sample").close(); });
  narrow.addEventListener("change", () => samplesTable?.refresh());
  addEventListener("resize", () => { clearTimeout(state.resizing); state.resizing = setTimeout(refreshCharts, 120); });
  addEventListener("beforeprint", () => { for (const chart of state.charts) if (!chart.element.hidden && CHARTS.includes(chart.spec)) chart.draw(); });
}

// ---------------------------------------------------------------- from the first data on

let samplesTable = null;

function showFigures() {
  makeCharts();
  showOverview();
  showConfig();
  showMetrics();
  refreshCharts();
  const names = state.runs.map((run) => run.part.name).join(", ");
  document.title = `${names} (${state.runs.map((run) => run.part.facts.status).join(", ")})`;
}

function showSamples() {
  samplesTable ??= new SampleTable();
  samplesTable.refresh();
}

async function startReport() {
  state.main = await block("main");
  state.runs = state.main.runs.map(newRun);
  state.runs.forEach((run, number) => take(run, state.main.runs[number]));
  showFigures();
  $("footer").textContent = `Made ${state.main.made} by enginehouse-report ${state.main.version}. It asks nothing of any host. Charts: uPlot (MIT).`;
  timelineWatcher.observe($("timeline"));
  await new Promise((done) => { requestAnimationFrame(() => setTimeout(done)); });
  const samples = await Promise.all(state.runs.map((run, number) => block(`samples-${number}`)));
  samples.forEach((part, number) => takeSamples(state.runs[number], part));
  showSamples();
}

async function start() {
  listen();
  showTheme();
  if (typeof DecompressionStream === "undefined") {
    trouble("This browser is too old for this page: it has no DecompressionStream (Chrome 80, Firefox 113, Safari 16.4 have it).");
    return;
  }
  await (LIVE ? startLive() : startReport());
  performance.mark("enginehouse-ready");
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

// ---------------------------------------------------------------- a run that is watched

const POLL_MS = 2000;
const POLL_ENDED_MS = 10000;

async function startLive() {
  state.main = { differing: {} };
  state.runs = [];
  await poll();
  timelineWatcher.observe($("timeline"));
  showSamples();
  setTimeout(pollAgain, POLL_MS);
}

async function poll() {
  const answer = await ask(`data?${new URLSearchParams(state.cursors || {})}`);
  const [run] = state.runs;
  if (answer.whole || !run) state.runs = [newRun(answer.part)];
  const rows = answer.part.metrics.rows + answer.part.validations.rows + answer.samples.rows;
  const changed = answer.whole || rows > 0 || JSON.stringify(answer.part.facts) !== JSON.stringify({ ...run?.part.facts });
  state.cursors = answer.next;
  take(state.runs[0], answer.part);
  takeSamples(state.runs[0], answer.samples);
  if (changed || answer.part.alarms.length !== state.alarms) showFigures();
  state.alarms = answer.part.alarms.length;
  if (samplesTable && rows && !state.timelines.length) timelineWatcher.observe($("timeline"));
  if (samplesTable && (answer.whole || answer.samples.rows)) showSamples();
  $("footer").textContent = `Read ${new Date().toLocaleTimeString()}. Charts: uPlot (MIT).`;
}

async function pollAgain() {
  if (!document.hidden) {
    try {
      await poll();
      trouble("");
    } catch (error) {
      trouble(`\`enginehouse watch\` does not answer (${error.message}); what is shown is what it said last.`);
    }
  }
  const ended = state.runs.length && !["running", "not begun"].includes(state.runs[0].part.facts.status);
  setTimeout(pollAgain, ended ? POLL_ENDED_MS : POLL_MS);
}

start().catch((error) => trouble(`This page could not be shown: ${error.message}`));
