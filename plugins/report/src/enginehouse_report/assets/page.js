"use strict";
// The page of runs. Data come in parts: a report has one, in blocks of the page; `enginehouse watch` sends what is new.
// All texts of a run are set as text, never as markup.

// ---------------------------------------------------------------- small things

const $ = (id) => document.getElementById(id);
const LIVE = document.documentElement.dataset.live;
const PALETTE = 8;
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [4, 4]];
const narrow = matchMedia("(max-width: 640px)");
const touch = matchMedia("(pointer: coarse)");

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

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function variable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const color = (place) => variable(`--c${place % PALETTE}`);

// ---------------------------------------------------------------- numbers and times

const digits = (value, count) => value.toLocaleString("en", { minimumFractionDigits: count, maximumFractionDigits: count });
const decimals = (size) => (size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : size >= 0.1 ? 3 : 2 - Math.floor(Math.log10(size)));
const decimalsOfStep = (step) => [0, 1, 2, 3, 4, 5, 6, 7, 8].find((places) => Math.abs(step * 10 ** places - Math.round(step * 10 ** places)) < 1e-6) ?? 8;
const known = (value) => value !== null && value !== undefined;

function figure(value) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return digits(value, 0);
  return size >= 1e6 || size < 1e-3 ? value.toExponential(2) : digits(value, decimals(size));
}

// One format for all values of a chart: the largest decides the decimals, and for seconds the unit.
function formatOf(values, unit) {
  let size = 0;
  let whole = true;
  for (const value of values) {
    if (!known(value)) continue;
    size = Math.max(size, Math.abs(value));
    whole &&= Number.isInteger(value);
  }
  const [factor, shown] = unit !== "s" || size >= 1 || !size ? [1, unit] : size >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  const scaled = size * factor;
  const exponential = scaled >= 1e7 || (scaled > 0 && scaled < 1e-3);
  const write = (value) => {
    if (!known(value)) return "–";
    if (Math.abs(value) < size * 1e-6) return "0";
    return exponential ? value.toExponential(2) : digits(value * factor, whole ? 0 : decimals(scaled));
  };
  const axis = (value, step) => {
    if (value === 0) return "0";
    return exponential ? value.toExponential(1) : digits(value * factor, decimalsOfStep(step * factor));
  };
  return { unit: shown, write, axis };
}

function duration(seconds) {
  if (!known(seconds)) return "";
  if (seconds > 0 && seconds < 1) return seconds < 1e-3 ? `${digits(seconds * 1e6, 0)} µs` : `${digits(seconds * 1e3, seconds < 0.1 ? 1 : 0)} ms`;
  if (seconds < 120) return `${digits(seconds, seconds < 10 ? 2 : 1)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min ${Math.floor(seconds % 60)} s` : `${digits(Math.floor(minutes / 60), 0)} h ${minutes % 60} min`;
}

function moment(text) {
  const date = new Date(text);
  return Number.isNaN(date.getTime()) ? text : `${date.toISOString().slice(0, 16).replace("T", " ")} UTC`;
}

const count = (number, what) => `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;
const pointing = () => (touch.matches ? "Tap" : "Point at");

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
    const holes = table.notFinite.get(name) || new Set();
    for (const place of places) holes.add(place + table.rows);
    table.notFinite.set(name, holes);
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

const state = { runs: [], meanings: {}, main: null, smoothing: 0, log: false, bands: null, zoom: null, charts: [], timelines: [], cursors: null };

function newRun(part) {
  return { part, metrics: newTable(), validations: newTable(), samples: newTable(), unread: [], damaged: 0 };
}

function take(run, part) {
  run.part = part;
  Object.assign(state.meanings, part.meanings);
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

// A chart whose lines all stay within `floor` of `center`, or never change, becomes a line of text. Units, and the words about a
// chart without its own, are those of docs/metrics.md.
const CHARTS = [
  { id: "reward", title: "Reward", about: "Mean reward per step, and of validations.",
    pick: /^(reward\/mean|validation\/(.*\/)?reward)$/, band: ["reward/mean", "reward/std", "reward/min", "reward/max"] },
  { id: "validation", title: "Validation", about: "Further metrics of held-out prompts.", pick: /^validation\/(?!(.*\/)?(reward|tokens_mean|truncated|loss|accuracy|failures|dropped)$|rewards\/|.*_stderr$)/ },
  { id: "preferences", title: "Preferences", about: "Accuracy and margins of pairs.", pick: /^(validation\/)?(accuracy|margin|rewards\/.*)$/ },
  { id: "lengths", title: "Response length", pick: /^(response\/tokens_(mean|max)|validation\/(.*\/)?tokens_mean)$/ },
  { id: "entropy", title: "Entropy", pick: /^(?!mismatch\/)(.*\/)?entropy$/ },
  { id: "kl", title: "KL divergence", about: "kl: from the reference. policy_kl: from the policy that the loss compares with.", pick: /^(?!mismatch\/)(.*\/)?(policy_)?kl$/, floor: 1e-8 },
  { id: "loss", title: "Loss", about: "The loss of each role.", pick: /^(.*\/)?loss$/ },
  { id: "grad", title: "Gradient norm", pick: /^(.*\/)?grad_norm$/ },
  { id: "phases", title: "Time per step", about: "Stacked by phase. The line is the whole step.", pick: /^time\/(?!step$)/, stacked: "time/step" },
  { id: "busy", title: "Utilization by role", unit: "fraction of the step", about: "Time in which an engine worked. It waited for the rest.", pick: /^busy\//, over: "time/step" },
  { id: "tokens", title: "Throughput", pick: /^tokens_per_second$/ },
  { id: "memory", title: "Memory", pick: /memory|(^|_)gib($|_)|_bytes$/ },
  { id: "equal", title: "Groups without signal", pick: /^reward\/groups_all_equal$/ },
  { id: "stopped", title: "Finished and truncated responses", about: "Stopped: ended by themselves. Truncated: cut at max_tokens.", pick: /^(response\/(stopped|truncated)|validation\/(.*\/)?truncated)$/ },
  { id: "clip", title: "Clipped tokens", pick: /(^|\/)clip_fraction$/ },
  { id: "lr", title: "Learning rate", pick: /^(.*\/)?lr$/ },
  { id: "reward-figures", title: "Parts of the reward", about: "Means per step.", pick: /^reward\/(?!mean$|std$|max$|min$|groups_all_equal$|failures$)/ },
  { id: "episodes", title: "Episodes", about: "Turns, seconds, and the fraction of time in tools.", pick: /^episode\// },
  { id: "mismatch", title: "Rollout/trainer KL", about: "By age of the weights. behind_N: sampled N versions ago.", pick: /^mismatch\/(behind_\d+\/)?kl$/, floor: 1e-8 },
  { id: "mismatch-ratio", title: "Rollout/trainer probability ratio", about: "Of a token and of a response. 1 if the engines agree.", pick: /^mismatch\/(behind_\d+\/)?(sequence_)?ratio$/, floor: 1e-4, center: 1 },
  { id: "mismatch-size", title: "Rollout/trainer log-prob gap", about: "Mean and largest gap of a step.", pick: /^mismatch\/absolute_(mean|max)$/, floor: 1e-4 },
  { id: "staleness", title: "Staleness", about: "How far a response's first token is behind.", pick: /^staleness\// },
  { id: "replicas", title: "Live replicas", pick: /^rollout\/replicas$/ },
  { id: "utilisation", title: "Rollout utilization", pick: /^rollout\/utilisation$/ },
  { id: "slow", title: "Slowest replica", pick: /^rollout\/slowest$/ },
  { id: "failures", title: "Restarts and failures", about: "Of replicas, rewards, episodes and optimizer steps.",
    pick: /^(rollout\/(restarts|retries)|(reward|validation)\/(.*\/)?failures|feed\/failed_.*|(.*\/)?skipped)$/ },
  { id: "queue", title: "Waiting requests and episodes", about: "The most requests that waited at once, and groups in progress.", pick: /^(rollout\/queued|feed\/(under_way|left_over))$/ },
];

const ALARM_CHARTS = {
  entropy_collapse: "entropy", kl_runaway: "kl", reward_all_equal: "equal", reward_zero: "reward", responses_cut: "stopped",
  mismatch_growing: "mismatch", engines_apart: "mismatch-size", off_policy: "staleness", replica_slow: "slow",
  controller_bound: "phases", steps_skipped: "failures", no_token_counted: "failures", gradient_zero: "grad",
};

// ---------------------------------------------------------------- the data of a chart

const SMALL_PHASE = 0.01;

function linesOf(spec) {
  const sums = new Map();
  const names = shownNames(spec, spec.names || metricNames().filter((name) => spec.pick.test(name)), sums);
  const largestFirst = [...names].sort((a, b) => (sums.get(b) || 0) - (sums.get(a) || 0)); // the first colours differ most
  const lines = [];
  names.forEach((name, nth) => {
    state.runs.forEach((run, number) => {
      const series = seriesOf(run, name);
      if (series) lines.push({ run, number, name, place: state.runs.length > 1 ? number : largestFirst.indexOf(name), nth, ...series });
    });
  });
  return lines.slice(0, 24);
}

// Phases that together take hardly any of the step would only add keys and colours.
function shownNames(spec, names, sums) {
  if (!spec.stacked) return names;
  const sum = (name) => state.runs.reduce((total, run) => total + (seriesOf(run, name)?.y || []).reduce((all, value) => all + (value || 0), 0), 0);
  for (const name of names) sums.set(name, sum(name));
  const least = SMALL_PHASE * sum(spec.stacked);
  return names.filter((name) => sums.get(name) >= least);
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
    if (!known(value)) return value;
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

// The one value of a line that never changes, or only by rounding; undefined for others.
function constantOf(line, spec) {
  const values = line.y.filter(known);
  if (line.holes?.size) return undefined;
  const center = spec.center || 0;
  if (spec.floor && values.every((value) => Math.abs(value - center) <= spec.floor)) return center;
  return values.every((value) => value === values[0]) ? values[0] : undefined;
}

const NO_UNITS = new Set(["", "reward", "as there", "set by the reward", "set by the engine"]);

// The unit that all lines of a chart have; empty where they have several, or the chart's title says it.
function unitOf(spec, lines) {
  if (spec.unit) return spec.unit;
  const units = new Set(lines.map((line) => state.meanings[line.name]?.[0] ?? "").filter((unit) => !NO_UNITS.has(unit)));
  return units.size === 1 ? [...units][0] : "";
}

function aboutOf(spec, lines) {
  const names = new Set(lines.map((line) => line.name));
  return spec.about ?? (names.size === 1 ? (state.meanings[lines[0].name]?.[1] || "").replaceAll("`", "") : "");
}

// What a chart that has nothing to draw says in a line of text; empty if it has something to draw.
function constantWords(spec) {
  const lines = linesOf(spec).filter((line) => line.y.some(known));
  const values = lines.map((line) => constantOf(line, spec));
  const alarmed = state.runs.some((run) => run.part.alarms.some((alarm) => ALARM_CHARTS[alarm.alarm] === spec.id));
  const several = lines.some((line) => line.y.filter(known).length > 1); // one step says nothing
  if (!several || alarmed || values.some((value) => value === undefined)) return "";
  const shown = unitOf(spec, lines);
  const unit = ["fraction", "ratio", "replicas"].includes(shown) ? "" : ` ${shown}`.trimEnd();
  const noise = lines.some((line) => line.y.some((value) => known(value) && value !== line.y.find(known)));
  const note = spec.floor && noise ? ` (${spec.center ? "within" : "below"} ${spec.floor.toExponential()})` : "";
  if (new Set(values).size === 1) return `${spec.title}: ${figure(values[0])}${unit}${note}`;
  return `${spec.title}: ${lines.map((line, at) => `${line.name} ${figure(values[at])}`).join(", ")}${unit}${note}`;
}

// All charts have one range of steps, so that a step is at the same place in each.
function stepRange() {
  if (state.zoom) return [state.zoom.min, state.zoom.max];
  const steps = state.runs.flatMap((run) => [run.metrics, run.validations].map((table) => table.columns.get("step") || []));
  const ends = steps.filter((values) => values.length).flatMap((values) => [values[0], values[values.length - 1]]);
  if (!ends.length) return [0, 1];
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  return low === high ? [low - 1, high + 1] : [low, high];
}

// ---------------------------------------------------------------- a chart

const plotHeight = () => (narrow.matches ? 140 : 190);

class Chart {
  constructor(spec, place) {
    this.spec = spec;
    this.log = false;
    this.off = new Set();
    this.plot = null;
    this.visible = false;
    this.dirty = true;
    this.box = make("div", { class: "plot", tabindex: 0, role: "img" });
    this.keys = make("ul", { class: "keys" });
    this.logButton = make("button", { type: "button", class: "icon", "aria-pressed": "false", "aria-label": "log y", title: "log y", onclick: () => this.toggleLog() }, "⇅");
    this.about = make("p", { class: "about" });
    this.title = make("h3", {}, spec.title);
    this.element = make("figure", { class: "chart", id: `chart-${spec.id}` },
      make("figcaption", {}, this.title, this.logButton), this.about, make("div", { class: "frame" }, this.box, make("span", { class: "x-label" }, "step")), this.keys);
    this.box.addEventListener("keydown", (event) => this.move(event));
    place.append(this.element);
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
    return (this.log !== state.log) && !this.isStacked;
  }

  get isStacked() {
    return Boolean(this.spec.stacked) && state.runs.length === 1;
  }

  draw() {
    if (!this.dirty) return;
    this.dirty = false;
    const lines = prepared(this.spec, this.logarithmic);
    this.element.hidden = this.folded || !lines.some((line) => line.y.some(known));
    if (this.element.hidden) return;
    this.lines = lines;
    this.format = formatOf(lines.flatMap((line) => line.shown), unitOf(this.spec, lines));
    this.describe();
    this.show();
  }

  // Takes the chart off the page while its lines are constant.
  fold(folded) {
    this.folded = folded;
    if (folded) this.element.hidden = true;
    else if (this.element.hidden) {
      this.element.hidden = false;
      this.dirty = true;
    }
  }

  describe() {
    const { lines, spec } = this;
    const unit = this.format.unit ? ` (${this.format.unit})` : "";
    this.title.textContent = `${spec.title}${unit}`;
    const notes = [aboutOf(spec, lines)];
    const holes = lines.reduce((sum, line) => sum + (line.holes?.size || 0), 0);
    if (holes) notes.push(`${count(holes, "value")} ${holes === 1 ? "is" : "are"} not a finite number (gaps).`);
    if (this.logarithmic) {
      const below = lines.reduce((sum, line) => sum + line.y.filter((value) => known(value) && value <= 0).length, 0);
      if (below) notes.push(`${count(below, "value")} of 0 or below cannot be drawn on a log scale.`);
    }
    if (this.isStacked && linesOf({ ...spec, stacked: null }).length > lines.length) notes.push("Phases below 1% are left out.");
    if (state.smoothing) notes.push(`Lines are means over about ${state.smoothing} steps.`);
    this.about.textContent = notes.filter(Boolean).join(" ");
    const last = lines.slice(0, 6).map((line) => `${nameOf(line)} ${this.format.write(lastOf(line.y))}`);
    this.box.setAttribute("aria-label", `${spec.title}${unit} by step. Last values: ${last.join(", ")}. Arrow keys move through the steps.`);
  }

  show() {
    const stacked = this.isStacked;
    const lines = this.lines.map((line) => ({ ...line }));
    if (stacked) stack(lines);
    this.bands = stacked ? [] : this.makeBands();
    const extra = stacked ? this.total() : this.bands;
    const shade = !stacked && state.smoothing && lines.length <= 4 ? lines.map((line) => ({ ...line, values: line.raw, faint: true })) : [];
    const all = [...lines, ...extra, ...shade];
    const signature = JSON.stringify([all.map((line) => [line.name, line.number, line.faint, line.edge]), this.logarithmic, theme(), this.box.clientWidth, stepRange()]);
    const data = joined(all);
    if (this.plot && signature === this.signature) {
      this.plot.setData(data, !state.zoom);
    } else {
      this.plot?.destroy();
      this.plot = new uPlot(this.options(all, stacked), data, this.box);
      this.signature = signature;
    }
    if (state.zoom) this.plot.setScale("x", state.zoom);
    this.showKeys();
  }

  makeBands() {
    const { band } = this.spec;
    if (!band || !state.bands) return [];
    return state.runs.flatMap((run, number) => {
      const [mean, spread, lowest, highest] = band.map((name) => seriesOf(run, name));
      if (!mean || !spread) return [];
      const within = (value, at) => Math.max(Math.min(value, highest?.y[at] ?? Infinity), lowest?.y[at] ?? -Infinity);
      return [1, -1].map((sign) => {
        const y = mean.y.map((value, at) => (value === null || spread.y[at] === null ? null : within(value + sign * spread.y[at], at)));
        const raw = drawn({ y }, this.logarithmic);
        return { name: `${sign}`, number, x: mean.x, y, values: smoothed(raw, state.smoothing), edge: true, place: number };
      });
    });
  }

  total() {
    const whole = seriesOf(state.runs[0], this.spec.stacked);
    return whole ? [{ name: this.spec.stacked, ...whole, values: smoothed(drawn(whole, false), state.smoothing), whole: true }] : [];
  }

  options(lines, stacked) {
    const series = [{}, ...lines.map((line) => this.seriesOptions(line, stacked))];
    const bands = [];
    if (stacked) {
      for (let at = this.lines.length; at > 1; at -= 1) bands.push({ series: [at, at - 1], fill: `${color(this.lines[at - 1].place)}99` });
    }
    for (let at = 0; at < this.bands.length; at += 2) {
      const first = this.lines.length + 1 + at;
      bands.push({ series: [first, first + 1], fill: `${color(this.bands[at].place)}2a` });
    }
    return {
      width: Math.max(this.box.clientWidth, 50), height: plotHeight(), series, bands, padding: [8, 18, 0, 0],
      legend: { show: false },
      cursor: { y: false, sync: { key: "steps", setSeries: false, scales: ["x", null] }, points: { size: 6 } },
      scales: { x: { time: false, range: stepRange }, y: this.logarithmic ? { distr: 3 } : { range: stacked ? (plot, low, high) => [0, rangeOf(plot, 0, high)[1]] : rangeOf } },
      axes: [this.axis(true), this.axis(false)],
      hooks: {
        setCursor: [() => this.tell()],
        setSelect: [(plot) => zoomTo(plot)],
        draw: [(plot) => this.mark(plot)],
      },
    };
  }

  seriesOptions(line, stacked) {
    if (line.edge) return { label: line.name, stroke: "transparent", width: 0, points: { show: false } };
    if (line.whole) return { label: line.name, stroke: variable("--text"), width: 1, points: { show: false } };
    const stroke = color(line.place);
    const few = line.values.filter(known).length < 40;
    const base = { label: line.name, show: !this.off.has(keyOf(line)), points: { show: !line.faint && few && !stacked, size: 5 } };
    if (line.faint) return { ...base, stroke: `${stroke}55`, width: 1 };
    if (stacked) return { ...base, stroke, width: 1, fill: line.nth === 0 ? `${stroke}99` : undefined };
    return { ...base, stroke, width: 1.6, dash: DASHES[line.nth % DASHES.length] };
  }

  axis(below) {
    const axis = {
      stroke: variable("--faint"), font: "11px system-ui, sans-serif", grid: { stroke: variable("--grid"), width: 1 },
      ticks: { show: false }, size: below ? 26 : 58, gap: 4,
    };
    if (!below) return { ...axis, values: (plot, ticks, _, __, step) => ticks.map((tick) => (tick === null ? "" : this.format.axis(tick, this.logarithmic ? Math.abs(tick) : step))) };
    return { ...axis, values: (plot, ticks) => ticks.map((tick) => digits(tick, 0)), incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6] };
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

  // With several runs a metric's name stands once, before the values of the runs in their colours.
  showKeys() {
    const many = state.runs.length > 1;
    this.when = make("li", { class: "when" }, "last");
    this.outputs = this.lines.map(() => make("output", {}));
    const items = this.lines.map((line, at) => {
      const named = !many || at === 0 || this.lines[at - 1].name !== line.name;
      const button = make("button", { type: "button", "aria-pressed": String(!this.off.has(keyOf(line))), title: nameOf(line) },
        swatch(line, this.isStacked), named ? line.name : "", this.outputs[at]);
      button.addEventListener("click", () => this.toggle(line, at, button));
      return make("li", {}, button);
    });
    const band = this.bands.length ? [make("li", { class: "band" }, swatch(this.bands[0], true), "±1 standard deviation, clipped to min–max")] : [];
    this.keys.replaceChildren(this.when, ...items, ...band);
    this.tell();
  }

  toggle(line, at, button) {
    const show = this.off.has(keyOf(line));
    if (show) this.off.delete(keyOf(line));
    else this.off.add(keyOf(line));
    button.setAttribute("aria-pressed", String(show));
    this.plot.setSeries(at + 1, { show });
  }

  tell() {
    if (!this.plot || !this.outputs) return;
    const at = this.plot.cursor.idx;
    const step = known(at) ? this.plot.data[0][at] : null;
    this.when.textContent = step === null ? "last" : `step ${digits(step, 0)}`;
    this.lines.forEach((line, nth) => {
      this.outputs[nth].textContent = this.format.write(step === null ? lastOf(line.shown) : valueAt(line, step));
    });
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

const nameOf = (line) => (state.runs.length > 1 ? `${line.run.part.name}: ${line.name}` : line.name);
const keyOf = (line) => `${line.number} ${line.name}`;

// As uPlot's own, but for a line that is flat: that is drawn in the middle of its value's surroundings.
function rangeOf(plot, low, high) {
  if (low === null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, low + Math.abs(low) * 0.1];
  return uPlot.rangeNum(low, high, 0.1, true);
}

function swatch(line, area = false) {
  const stroke = `var(--c${line.place % PALETTE})`;
  if (area) {
    const hatch = line.hatched ? [svg("path", { d: "M-2 8L6 0M2 12L14 0M8 14L16 6", stroke })] : [];
    return svg("svg", { width: 14, height: 12, "aria-hidden": "true" }, svg("rect", { width: 14, height: 12, rx: 2, fill: stroke, "fill-opacity": line.edge || line.hatched ? 0.3 : 1 }), ...hatch);
  }
  return svg("svg", { width: 22, height: 8, "aria-hidden": "true" },
    svg("path", { d: "M0 4H22", "stroke-width": 3, stroke, "stroke-dasharray": DASHES[line.nth % DASHES.length].join(" ") }));
}

function lastOf(values) {
  for (let at = values.length - 1; at >= 0; at -= 1) if (known(values[at])) return values[at];
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

function zoomTo(plot) {
  if (plot.select.width < 4) return;
  const min = plot.posToVal(plot.select.left, "x");
  const max = plot.posToVal(plot.select.left + plot.select.width, "x");
  zoom(max > min ? { min, max } : null);
}

function zoom(range) {
  state.zoom = range;
  $("unzoom").hidden = range === null;
  const [min, max] = stepRange();
  for (const chart of state.charts) chart.plot?.setScale("x", { min, max });
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
    const made = state.charts.some((chart) => chart.spec === spec);
    if (!made && metricNames().some((name) => spec.pick.test(name))) state.charts.push(new Chart(spec, $("chart-grid")));
  }
  const order = state.charts.filter((chart) => CHARTS.includes(chart.spec)).sort((a, b) => CHARTS.indexOf(a.spec) - CHARTS.indexOf(b.spec));
  if (order.some((chart, at) => $("chart-grid").children[at] !== chart.element)) $("chart-grid").append(...order.map((chart) => chart.element));
  const constants = [];
  for (const chart of order) {
    const words = constantWords(chart.spec);
    chart.fold(Boolean(words));
    if (words) constants.push(words);
  }
  $("constants").replaceChildren(...(constants.length ? [make("strong", {}, "The same in all steps: "), constants.join(" · ")] : []));
  showChartsHint();
}

function showChartsHint() {
  const sentences = [`${pointing()} a chart to read a step in all of them${touch.matches ? "" : "; drag to zoom"}. A dashed vertical line is an alarm's step.`];
  const binned = state.runs.map((run) => run.metrics.binned).filter(Boolean);
  if (binned.length) sentences.push(`A long run: of each ${Math.max(...binned)} steps this page has only the lowest and the highest value; metrics.jsonl has all.`);
  $("charts-hint").textContent = state.charts.length ? sentences.join(" ") : "No metrics yet.";
  $("run-keys").replaceChildren(...(state.runs.length > 1 ? state.runs.map((run, number) => make("li", {}, runSwatch(number), run.part.name)) : []));
}

// ---------------------------------------------------------------- all metrics

const metricRows = new Map();
const MOST_SHOWN = 400;
const SPARK = { width: 110, height: 22, points: 60 };

function showMetrics() {
  const words = $("metrics-search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const names = metricNames().sort();
  const chosen = names.filter((name) => words.every((word) => name.toLowerCase().includes(word)));
  $("metrics-count").textContent = `${chosen.length} of ${names.length}`;
  if (words.length) $("metrics-all").open = true;
  if (!$("metrics-all").open) return;
  const wanted = chosen.slice(0, MOST_SHOWN);
  for (const name of wanted) if (!metricRows.has(name)) metricRows.set(name, new MetricRow(name));
  for (const name of wanted) metricRows.get(name).refresh();
  $("metrics-list").replaceChildren(...wanted.map((name) => metricRows.get(name).element));
}

class MetricRow {
  constructor(name) {
    this.name = name;
    this.spark = make("span", { class: "spark" });
    this.last = make("output", {});
    this.button = make("button", { type: "button", "aria-expanded": "false", onclick: () => this.toggle() }, make("span", { class: "name" }, name, " ", make("small", { class: "faint" }, (state.meanings[name] || [""])[0])), this.spark, this.last);
    this.element = make("li", {}, this.button);
  }

  refresh() {
    const series = state.runs.map((run) => seriesOf(run, this.name));
    const values = series.flatMap((line) => line?.y.filter(known) || []);
    const [low, high] = [values.reduce((a, b) => Math.min(a, b), Infinity), values.reduce((a, b) => Math.max(a, b), -Infinity)];
    this.last.textContent = figure(lastOf(series.find(Boolean)?.y || []));
    if (!(high > low)) this.spark.textContent = values.length > 1 ? "constant" : "";
    else this.spark.replaceChildren(svg("svg", { ...SPARK, "aria-hidden": "true" }, ...series.map((line, number) => line && sparkline(line.y, low, high, number)).filter(Boolean)));
  }

  toggle() {
    if (!this.chart) {
      this.chart = new Chart({ id: `metric-${state.charts.length}`, title: this.name, names: [this.name] }, this.element);
      state.charts.push(this.chart);
    }
    const open = this.button.getAttribute("aria-expanded") === "false";
    this.button.setAttribute("aria-expanded", String(open));
    this.chart.fold(!open);
    if (open) this.chart.draw();
  }
}

function sparkline(values, low, high, number) {
  const points = values.map((value, at) => [at / Math.max(values.length - 1, 1), value]).filter(([, value]) => known(value));
  const every = Math.ceil(points.length / SPARK.points);
  const kept = points.filter((_, at) => at % every === 0 || at === points.length - 1);
  const place = ([at, value]) => `${(at * SPARK.width).toFixed(1)} ${(SPARK.height - 2 - ((value - low) / (high - low)) * (SPARK.height - 4)).toFixed(1)}`;
  return svg("path", { d: `M${kept.map(place).join("L")}`, fill: "none", stroke: `var(--c${number % PALETTE})`, "stroke-width": 1.4 });
}

// ---------------------------------------------------------------- the run in words

const STATUS = { finished: "good", running: "", interrupted: "warn", killed: "bad", failed: "bad" };

function showOverview() {
  const { differing } = state.main;
  const parts = state.runs.map((run) => run.part);
  const differences = parts.length < 2 ? [] : [
    make("h2", {}, "Differences between the runs"),
    pairs({ ...differing.config, ...prefixed("version of ", differing.versions) }, parts, "Configs and versions are the same."),
  ];
  $("overview").replaceChildren(
    make("div", { class: "runs" }, ...state.runs.map(runCard)), ...differences, ...alarmList(), ...state.runs.map(detailsOf));
}

const prefixed = (prefix, rows) => Object.fromEntries(Object.entries(rows).map(([name, value]) => [prefix + name, value]));

function runCard(run, number) {
  const { facts, alarms, error } = run.part;
  const tone = STATUS[facts.status] === "good" && alarms.length ? "warn" : STATUS[facts.status] || "";
  const status = alarms.length ? `${facts.status}, ${count(alarms.length, "alarm")}` : facts.status;
  const title = make("h1", {}, state.runs.length > 1 ? runSwatch(number) : "", run.part.name, " ", make("span", { class: `status ${tone}` }, status));
  const problem = facts.error ? [make("pre", { class: "bad" }, facts.error)] : [];
  const trace = error ? [make("details", {}, make("summary", {}, "Traceback"), make("pre", {}, error))] : [];
  return make("article", {}, title, ...problem, ...trace, headlineOf(run));
}

function runSwatch(number) {
  const mark = make("span", { class: "swatch" });
  mark.style.borderTopColor = `var(--c${number % PALETTE})`;
  return mark;
}

const NAMES = { "reward/mean": "Reward", "validation/reward": "Validation reward", accuracy: "Accuracy", "validation/accuracy": "Validation accuracy", "validation/loss": "Validation loss" };
const titleOf = (name) => NAMES[name] || (name.endsWith("loss") ? "Loss" : name);
const share = (value) => (Math.abs(value) >= 1000 || (value !== 0 && Math.abs(value) < 0.001) ? figure(value) : digits(value, 3));
const arrow = (first, last) => `${share(first)} → ${share(last)}`;

// What a reader looks for first: did it learn, how good is it, how fast was it, is something wrong.
function headlineOf(run) {
  const { learned, validated, speed } = run.part.headline;
  const items = [];
  if (learned) items.push([titleOf(learned.name), arrow(learned.first, learned.last), learned.over > 1 ? `means of the first and last ${learned.over} steps` : "first and last step"]);
  if (validated) items.push(validationItem(validated));
  if (speed) items.push(["Speed", `${duration(speed.seconds / speed.steps)}/step`, speedNote(run.part.facts, speed)]);
  const alarms = run.part.alarms.length;
  items.push(["Alarms", alarms ? make("a", { href: "#alarms" }, count(alarms, "alarm")) : "No alarms", "", alarms ? "warn" : ["bad", "warn"].includes(STATUS[run.part.facts.status]) ? "" : "good"]);
  return make("dl", { class: "headline" }, ...items.map(([name, value, note, tone]) =>
    make("div", { class: tone || "" }, make("dt", {}, name), make("dd", {}, value), note ? make("dd", { class: "remark" }, note) : "")));
}

function validationItem({ name, first, best, last, worse }) {
  const [value, note] = first[0] === last[0]
    ? [share(last[1]), `at step ${figure(last[0])}`]
    : [arrow(first[1], last[1]), `steps ${figure(first[0])} and ${figure(last[0])}; best ${share(best[1])} at step ${figure(best[0])}`];
  return [titleOf(name), value, worse ? `${note}; ${worse}` : note, worse ? "warn" : ""];
}

function speedNote(facts, speed) {
  const total = known(facts.seconds) ? `; ${facts.at_least ? "at least " : ""}${duration(facts.seconds)} in total` : "";
  return `${count(speed.steps, "step")} in ${duration(speed.seconds)}${total}`;
}

function detailsOf(run) {
  const title = state.runs.length > 1 ? `Run details: ${run.part.name}` : "Run details";
  const details = make("details", { class: "details", open: Boolean(run.detailsOpen) }, make("summary", {}, title), factList(run));
  details.addEventListener("toggle", () => { run.detailsOpen = details.open; });
  return details;
}

function factList(run) {
  const { facts, versions, path, host } = run.part;
  const steps = facts.steps ?? lastOf(run.metrics.columns.get("step") || []);
  const rows = [
    ["state", facts.said],
    ["steps", known(steps) ? `${figure(steps)}${facts.of_steps ? ` of ${figure(facts.of_steps)}` : ""}` : ""],
    ["started", facts.started && `${moment(facts.started)}${facts.resumed ? " (last process)" : ""}`],
    ["ended", facts.ended && moment(facts.ended)],
    ["resumed", facts.resumed ? `${facts.resumed === 1 ? "once" : `${facts.resumed} times`}, the last time after step ${facts.resumed_after}` : ""],
    ["command", facts.command],
    ["model", facts.model],
    ["algorithm", facts.algorithm],
    ["best model", facts.best ? `${facts.best.metric} ${figure(facts.best.value)} at step ${figure(facts.best.step)}` : ""],
    ...facts.engines.map((engine) => [engine.role, engineWords(engine)]),
    ["versions", Object.entries(versions).filter(([name]) => /^(enginehouse|torch|ray|python|vllm|sglang)$/.test(name)).map((pair) => pair.join(" ")).join(", ")],
    ["directory", `${path}${host ? ` on ${host}` : ""}`],
  ];
  return make("dl", { class: "facts" }, ...rows.filter((row) => row[1]).flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, String(text))]));
}

function engineWords(engine) {
  const mesh = engine.mesh ? Object.entries(engine.mesh).filter(([, size]) => size > 1).map(([name, size]) => `${name} ${size}`).join(", ") : "";
  const device = /^(cpu|cuda)$/.test(engine.device) ? engine.device.toUpperCase() : engine.device;
  const version = engine.version && /^(fsdp|megatron)$/.test(engine.backend) ? `(torch ${engine.version})` : engine.version;
  const nodes = engine.nodes > 1 ? ` on ${count(engine.nodes, "node")}` : "";
  const runtime = engine.runtime && engine.runtime !== "current" ? `runtime ${engine.runtime}` : "";
  return [`${engine.backend} ${version}`.trim(), device, `${count(engine.ranks, "rank")}${nodes}`, mesh, runtime].filter(Boolean).join(", ");
}

function alarmList() {
  const items = state.runs.flatMap((run) => run.part.alarms.map((alarm) => alarmItem(run, alarm)));
  return items.length ? [make("ul", { class: "alarms", id: "alarms", "aria-label": "Alarms" }, ...items)] : [];
}

function alarmItem(run, alarm) {
  const chart = ALARM_CHARTS[alarm.alarm];
  const where = alarm.step === null ? "" : `step ${figure(alarm.step)}: `;
  const of = state.runs.length > 1 ? `${run.part.name}, ` : "";
  return make("li", {},
    make("strong", {}, `${of}${where}${(alarm.alarm || "alarm").replaceAll("_", " ")}`), make("div", {}, alarm.said),
    alarm.advice ? make("div", {}, make("em", {}, "Try: "), alarm.advice) : "",
    chart && state.charts.some((each) => each.spec.id === chart) ? make("a", { href: `#chart-${chart}` }, "see the chart") : "");
}

// ---------------------------------------------------------------- config and versions

function showConfig() {
  const box = $("config-body");
  const parts = state.runs.map((run) => run.part);
  const shown = JSON.stringify(parts.map((part) => [part.name, part.config, part.config_problem, part.versions]));
  if (shown === box.dataset.shown) return; // what a reader has opened stays open
  box.dataset.shown = shown;
  const problems = parts.filter((part) => part.config_problem).map((part) => make("p", { class: "warn" }, `${part.name}: ${part.config_problem}`));
  const changed = [...new Set(parts.flatMap((part) => part.changed))];
  const keys = [...new Set(parts.flatMap((part) => Object.keys(part.config)))];
  const others = keys.filter((key) => !changed.includes(key));
  const packages = [...new Set(parts.flatMap((part) => Object.keys(part.versions)))].sort();
  const values = (names, field) => Object.fromEntries(names.map((name) => [name, parts.map((part) => (Object.hasOwn(part[field], name) ? part[field][name] : undefined))]));
  box.replaceChildren(...problems,
    make("h3", {}, "Changed from defaults"), pairs(values(changed, "config"), parts, "No key differs from its default."),
    make("details", {}, make("summary", {}, `Defaults, ${count(others.length, "key")}`), pairs(values(others, "config"), parts, "")),
    make("details", {}, make("summary", {}, "Versions"), pairs(values(packages, "versions"), parts, "")));
}

function pairs(rows, parts, none) {
  const entries = Object.entries(rows);
  if (!entries.length) return make("p", { class: "hint" }, none);
  const names = parts.length > 1 ? parts.map((part) => part.name) : ["value"];
  const head = make("tr", {}, make("th", { scope: "col" }, "key"), ...names.map((name) => make("th", { scope: "col" }, name)));
  const text = (value) => (known(value) ? String(value) : "–");
  const body = entries.map(([key, values]) => make("tr", {}, make("th", { scope: "row" }, key), ...values.map((value) => make("td", {}, text(value)))));
  return make("div", { class: "wide" }, make("table", { class: "plain" }, make("thead", {}, head), make("tbody", {}, ...body)));
}

// ---------------------------------------------------------------- the table of samples

const rowHeight = () => (narrow.matches ? 62 : 30);
const COLUMNS = [
  { name: "reward", width: "4.2rem", number: true },
  { name: "prompt", width: "17rem", tail: 34 },
  { name: "response", width: "22rem" },
  { name: "reference", title: "reference answer", width: "10rem" },
  { name: "answer", title: "answer found", width: "8rem" },
  { name: "failure", width: "12rem" },
  { name: "step", width: "3.6rem", number: true },
  { name: "kind", title: "from", width: "5rem", shown: (value) => (value ? "validation" : "training") },
  { name: "tokens", width: "4rem", number: true },
  { name: "finish", width: "4.4rem" },
  { name: "turns", width: "3.4rem", number: true },
  { name: "episode", width: "4.6rem", number: true },
  { name: "segment", width: "5rem", number: true },
  { name: "group", width: "4rem", number: true },
  { name: "task", width: "4rem", number: true },
];

function columnsFor(names) {
  const parts = names.filter((name) => name.startsWith("reward/")).map((name) => ({ name, width: "7rem", number: true }));
  return [...COLUMNS.filter((column) => names.includes(column.name)), ...parts];
}

const oneLine = (text) => text.replace(/\r?\n/g, "⏎");
// A prompt in one line, without the marks that a chat template puts between its messages.
const plain = (text) => text.replace(/(<\|[^|<>]*\|>\s*)+(assistant\s*)?$/, "").replace(/\s*(<\|[^|<>]*\|>\s*)+/g, " ").trim();
const tailOf = (text, most) => (text.length > most ? `…${text.slice(-most)}` : text);

class SampleTable {
  constructor() {
    this.run = 0;
    this.sort = { name: "reward", down: false };
    this.order = new Uint32Array(0);
    this.active = 0;
    this.made = "";
    this.build();
  }

  get samples() {
    return state.runs[this.run].samples;
  }

  build() {
    const choice = (options, act) => make("select", { onchange: act }, ...options.map(([value, text]) => make("option", { value }, text)));
    this.search = make("input", { type: "search", placeholder: "prompt, response, failure", oninput: () => this.later() });
    this.kind = choice([["last", "the last validation"], ["", "all files"], ["0", "training steps"], ["1", "validations"]], () => this.select());
    this.only = choice([["", "all rows"], ["failure", "with a failure"], ["whole", "with tokens here"]], () => this.select());
    this.which = choice([], () => this.choose(Number(this.which.value)));
    this.sorting = choice([], () => this.sortBy(this.columns.find((column) => column.name === this.sorting.value)));
    this.count = make("span", { role: "status", class: "faint" });
    $("samples-tools").replaceChildren(
      make("label", {}, "Search ", this.search), make("label", {}, "From ", this.kind), make("label", {}, "Show ", this.only),
      make("label", { class: "sorting" }, "Sort by ", this.sorting),
      (this.whichLabel = make("label", { hidden: true }, "Run ", this.which)), this.count);
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
    this.columns = columnsFor([...this.samples.columns.keys()]);
    this.runChoice();
    this.kind.options[0].textContent = lastFile(this.samples).kind ? "the last validation" : "the last step";
    const made = JSON.stringify(this.columns.map((column) => column.name));
    if (made !== this.made) this.makeHead();
    this.made = made;
    $("samples-hint").textContent = describeSamples(state.runs[this.run]);
    for (const part of [this.box, $("samples-tools")]) part.hidden = !this.samples.rows;
    this.select();
  }

  runChoice() {
    this.whichLabel.hidden = state.runs.length < 2;
    this.which.replaceChildren(...state.runs.map((run, number) => make("option", { value: number, selected: number === this.run }, run.part.name)));
  }

  makeHead() {
    this.head.replaceChildren(this.row(this.columns.map((column) => {
      const button = make("button", { type: "button", onclick: () => this.sortBy(column) }, column.title || column.name);
      return make("div", { role: "columnheader", class: column.number ? "number" : "", "data-name": column.name, title: column.title || column.name }, button);
    })));
    this.sorting.replaceChildren(...this.columns.map((column) => make("option", { value: column.name }, column.title || column.name)));
    this.showSort();
  }

  row(cells) {
    const row = make("div", { class: "row", role: "row" }, ...cells);
    if (!narrow.matches) row.style.gridTemplateColumns = this.columns.map((column) => column.width).join(" ");
    return row;
  }

  sortBy(column) {
    this.sort = { name: column.name, down: this.sort.name === column.name ? !this.sort.down : Boolean(column.number) && column.name !== "reward" };
    this.showSort();
    this.select();
  }

  showSort() {
    this.sorting.value = this.sort.name;
    for (const cell of this.head.querySelectorAll("[role=columnheader]")) {
      const on = cell.dataset.name === this.sort.name;
      cell.setAttribute("aria-sort", on ? (this.sort.down ? "descending" : "ascending") : "none");
      cell.firstChild.textContent = cell.title + (on ? (this.sort.down ? " ▾" : " ▴") : "");
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
    const texts = ["prompt", "response", "reference", "answer", "failure"].map(at).filter(Boolean);
    const last = this.kind.value === "last" ? lastFile(this.samples) : null;
    const chosen = [];
    for (let row = 0; row < rows; row += 1) {
      if (last ? at("kind")[row] !== last.kind || at("step")[row] !== last.step : this.kind.value && String(at("kind")[row]) !== this.kind.value) continue;
      if (this.only.value === "failure" && !at("failure")?.[row]) continue;
      if (this.only.value === "whole" && !LIVE && (at("block")?.[row] ?? null) === null) continue;
      if (words && !texts.some((text) => text[row]?.toLowerCase().includes(words))) continue;
      chosen.push(row);
    }
    this.order = Uint32Array.from(chosen);
    const values = at(this.sort.name);
    if (values) this.order.sort(comparing(values, this.sort.down, this.sort.name === "reward" ? at("failure") : null));
    this.count.textContent = `${count(this.order.length, "row")} of ${digits(rows, 0)}`;
    this.active = Math.min(this.active, Math.max(this.order.length - 1, 0));
    this.box.setAttribute("aria-rowcount", this.order.length + 1);
    this.body.style.height = `${this.order.length * rowHeight()}px`;
    this.draw();
  }

  draw() {
    if (!this.columns?.length) return;
    const from = Math.max(Math.floor(this.box.scrollTop / rowHeight()) - 6, 0);
    const to = Math.min(from + Math.ceil(this.box.clientHeight / rowHeight()) + 14, this.order.length);
    const focused = this.body.contains(document.activeElement);
    const rows = [];
    for (let place = from; place < to; place += 1) rows.push(this.bodyRow(place));
    this.body.replaceChildren(...rows);
    if (focused) this.body.querySelector(`[data-place="${this.active}"]`)?.focus({ preventScroll: true });
  }

  bodyRow(place) {
    const row = this.order[place];
    const element = this.row(narrow.matches ? this.twoLines(row) : this.columns.map((column) => this.cell(column, row)));
    element.style.top = `${place * rowHeight()}px`;
    element.dataset.place = place;
    element.tabIndex = place === this.active ? 0 : -1;
    element.setAttribute("aria-rowindex", place + 2);
    return element;
  }

  cell(column, row) {
    const value = this.samples.columns.get(column.name)[row];
    const number = column.name === "reward" ? share : figure;
    const text = column.shown ? column.shown(value) : typeof value === "number" ? number(value) : (value ?? "");
    return make("div", { role: "gridcell", class: column.number ? "number" : "" }, column.tail ? tailOf(oneLine(plain(text)), column.tail) : oneLine(text));
  }

  // Where the window is narrow: the prompt, and below it the reward and the response.
  twoLines(row) {
    const at = (name) => this.samples.columns.get(name)?.[row];
    const second = [make("b", { class: "number" }, known(at("reward")) ? share(at("reward")) : "–"), " ", oneLine(at("failure") || at("response") || "")];
    if (known(at("reference"))) second.push(make("span", { class: "faint" }, ` (reference: ${oneLine(at("reference"))})`));
    return [make("div", { role: "gridcell", class: "line prompt" }, tailOf(oneLine(plain(at("prompt") || "")), 44)), make("div", { role: "gridcell", class: "line" }, ...second)];
  }

  key(event) {
    const page = Math.floor(this.box.clientHeight / rowHeight()) - 2;
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Enter") showSample(this.run, this.order[this.active]);
    if (by === undefined) return;
    event.preventDefault();
    this.active = Math.min(Math.max(this.active + by, 0), this.order.length - 1);
    const top = this.active * rowHeight();
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    if (top + 3 * rowHeight() > this.box.scrollTop + this.box.clientHeight) this.box.scrollTop = top + 3 * rowHeight() - this.box.clientHeight;
    this.draw();
    this.body.querySelector(`[data-place="${this.active}"]`)?.focus({ preventScroll: true });
  }

  clicked(event) {
    const element = event.target.closest(".row");
    if (!element) return;
    this.active = Number(element.dataset.place);
    showSample(this.run, this.order[this.active]);
  }

  // The row before or after another in the order of the table.
  neighbour(run, row, by) {
    const place = run === this.run ? this.order.indexOf(row) : -1;
    return place < 0 ? undefined : this.order[place + by];
  }
}

// With `failures`, rows that failed come before all others, or behind them.
function comparing(values, down, failures) {
  const sign = down ? -1 : 1;
  const value = (row) => (failures?.[row] ? -Infinity : values[row]);
  return (a, b) => {
    const [first, second] = [value(a), value(b)];
    if (first === second) return a - b;
    if (!known(first)) return 1;
    if (!known(second)) return -1;
    return (first < second ? -1 : 1) * sign;
  };
}

// The kind and the step of the last validation, or of the last step where there is no validation.
function lastFile(samples) {
  const [kinds, steps] = ["kind", "step"].map((name) => samples.columns.get(name) || []);
  let last = { kind: 0, step: -1 };
  for (let row = 0; row < samples.rows; row += 1) {
    if (kinds[row] > last.kind || (kinds[row] === last.kind && steps[row] > last.step)) last = { kind: kinds[row], step: steps[row] };
  }
  return last;
}

function describeSamples(run) {
  const { samples, unread, damaged } = run;
  if (!samples.rows) return "No samples: the run writes some every `train.samples_every` steps.";
  const sentences = [`${touch.matches ? "Tap a row" : "Click a row, or press Enter on it,"} to see all of it. The search covers what the table has: the beginning and the end of prompts, the beginning of responses.`];
  if (!LIVE) {
    const whole = samples.columns.get("block").filter((place) => place !== null).length;
    if (whole < samples.rows) {
      sentences.push(`${count(whole, "row")} of ${digits(samples.rows, 0)} ${whole === 1 ? "has its" : "have their"} tokens in this page: the best and the worst of each file, and the newest. The others are in samples/, and \`enginehouse watch\` shows all.`);
    }
  }
  if (unread.length && LIVE) sentences.push(`${count(unread.length, "older file")} still to be read.`);
  else if (unread.length) sentences.push(`Older files that were not read: ${unread.slice(0, 3).join(", ")}${unread.length > 3 ? ` and ${unread.length - 3} more` : ""} (\`enginehouse report\` reads up to 100,000 rows, the report at a run's end for some seconds).`);
  if (damaged) sentences.push(`${count(damaged, "line")} held no row.`);
  return sentences.join(" ");
}

// ---------------------------------------------------------------- a bad and a good sample, and one prompt before and after

function showShowcase() {
  const cards = state.runs.flatMap((run, number) => showcaseOf(run, number));
  $("showcase").replaceChildren(...cards);
  $("showcase").hidden = !cards.length;
}

function showcaseOf(run, number) {
  const { samples } = run;
  const rewards = samples.columns.get("reward");
  if (!samples.rows || !rewards) return [];
  const last = lastFile(samples);
  const rows = [...Array(samples.rows).keys()].filter((row) => samples.columns.get("kind")[row] === last.kind && samples.columns.get("step")[row] === last.step);
  rows.sort(comparing(rewards, false, samples.columns.get("failure")));
  const scored = rows.filter((row) => known(rewards[row]));
  if (!scored.length) return [];
  const [worst, best] = [rows[0], scored[scored.length - 1]];
  const where = `${last.kind ? "validation" : "training"}, step ${figure(last.step)}`;
  const name = state.runs.length > 1 ? `${run.part.name}: ` : "";
  const same = rewards[worst] === rewards[best];
  const cards = [sampleCard(`${name}${same ? "A sample, rewarded as all" : "A bad sample"}`, where, number, [worst])];
  if (state.runs.length > 1) return cards;
  if (!same) cards.push(sampleCard("A good sample", where, number, [best]));
  const improved = mostImproved(samples, rows);
  if (improved) cards.push(sampleCard("One prompt, before and after", "validation", number, improved));
  return cards;
}

// The rows of the prompt whose reward rose most between the first validation and the last.
function mostImproved(samples, lastRows) {
  const [kinds, steps, prompts, rewards] = ["kind", "step", "prompt", "reward"].map((name) => samples.columns.get(name));
  const before = new Map();
  for (let row = samples.rows - 1; row >= 0; row -= 1) {
    const earlier = before.get(prompts[row]);
    if (kinds[row] && known(rewards[row]) && (earlier === undefined || steps[row] <= steps[earlier])) before.set(prompts[row], row);
  }
  let most = null;
  for (const row of lastRows) {
    const first = before.get(prompts[row]);
    if (!kinds[row] || first === undefined || steps[first] === steps[row] || !known(rewards[row])) continue;
    const gain = rewards[row] - rewards[first];
    if (!most || gain > most.gain) most = { gain, rows: [first, row] };
  }
  return most?.rows;
}

function sampleCard(title, where, number, rows) {
  const at = (name, row) => state.runs[number].samples.columns.get(name)?.[row];
  const reference = at("reference", rows[0]);
  return make("article", { class: "sample-card" },
    make("h3", {}, title, " ", make("small", { class: "faint" }, where)),
    make("p", { class: "prompt" }, tailOf(oneLine(plain(at("prompt", rows[0]) || "")), 120)),
    ...rows.map((row) => make("p", {},
      rows.length > 1 ? make("span", { class: "faint" }, `step ${figure(at("step", row))} `) : "",
      make("b", { class: "number" }, known(at("reward", row)) ? share(at("reward", row)) : "failed"), " ", oneLine(at("failure", row) || at("response", row) || "(empty)"))),
    known(reference) ? make("p", { class: "faint" }, `Reference answer: ${oneLine(reference)}`) : "",
    make("button", { type: "button", onclick: () => showSample(number, rows[rows.length - 1]) }, "Show tokens"));
}

// ---------------------------------------------------------------- one sample

const SHADES = [["mask", "who wrote it"], ["logprob", "log-probability"], ["advantage", "advantage"], ["version", "weight version"], ["", "nothing"]];
let shade = "mask";

function showSample(number, row) {
  openSample(number, row).catch((error) => trouble(`A sample could not be read: ${error.message}`));
}

async function openSample(number, row) {
  const dialog = $("sample");
  const { samples } = state.runs[number];
  const whole = await wholeRow(number, samples, row);
  const place = `line ${samples.columns.get("line")[row]} of samples/${fileOf(samples, row)}`;
  const step = (by, label) => {
    const next = samplesTable?.neighbour(number, row, by);
    return make("button", { type: "button", "data-by": by, disabled: next === undefined, onclick: () => showSample(number, next) }, label);
  };
  const top = make("div", { class: "top tools" }, make("button", { type: "button", onclick: () => dialog.close() }, "Close"),
    step(-1, "◀ Previous"), step(1, "Next ▶"), make("span", {}, `Step ${figure(samples.columns.get("step")[row])}, ${place}`));
  const inside = make("div", { class: "inside" });
  dialog.replaceChildren(top, inside);
  if (whole) showWhole(inside, whole);
  else showHead(inside, samples, row, place);
  showEarlier(inside, samples, row);
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
}

// Arrow keys go from sample to sample, except in the tokens and in a list to choose from.
function turnPage(event) {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by || event.target.closest?.(".tokens, select")) return;
  $("sample").querySelector(`[data-by="${by}"]`)?.click();
}

function showHead(box, samples, row, place) {
  const at = (name) => samples.columns.get(name)?.[row];
  box.append(
    make("p", { class: "warn" }, `Only the beginning is in this page: ${place} has all of it, and \`enginehouse watch\` shows it.`),
    make("h3", {}, "Prompt"), make("pre", {}, at("prompt") || ""), make("h3", {}, "Response"), make("pre", {}, at("response") || ""));
  if (known(at("reference"))) box.append(make("h3", {}, "Reference answer"), make("pre", {}, at("reference")));
}

function showEarlier(box, samples, row) {
  const at = (name, place) => samples.columns.get(name)?.[place];
  if (!at("kind", row)) return;
  const same = [...Array(samples.rows).keys()].filter((each) => at("kind", each) && each !== row && at("prompt", each) === at("prompt", row) && at("step", each) !== at("step", row));
  if (!same.length) return;
  same.sort((a, b) => at("step", a) - at("step", b));
  box.append(make("h3", {}, "The same prompt in other validations"), make("ul", { class: "earlier" }, ...same.slice(0, 10).map((each) =>
    make("li", {}, `step ${figure(at("step", each))}: `, make("b", {}, known(at("reward", each)) ? share(at("reward", each)) : "failed"), ` ${oneLine(at("response", each) || "")}`))));
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
    box.append(make("p", { class: "hint" }, "This row was written without its tokens."));
  }
  if (Array.isArray(whole.turns)) box.append(make("h3", {}, "Turns"), turnTable(whole.turns));
}

const FACT_NAMES = { reference: "reference answer", answer: "answer found" };
const TEXTS = new Set(["prompt", "response", "by_token", "turns"]);

function rowFacts(whole) {
  const entries = Object.entries(whole).filter(([name]) => !TEXTS.has(name));
  const text = (name, value) => (typeof value === "number" ? (name === "reward" ? share : figure)(value) : typeof value === "string" ? value : JSON.stringify(value));
  return make("dl", { class: "facts" }, ...entries.flatMap(([name, value]) => [make("dt", {}, FACT_NAMES[name] || name), make("dd", {}, text(name, value) ?? "")]));
}

function turnTable(turns) {
  const rows = turns.filter((turn) => turn && typeof turn === "object");
  const names = [...new Set(rows.flatMap((turn) => Object.keys(turn)))];
  const head = make("tr", {}, make("th", {}, "turn"), ...names.map((name) => make("th", {}, name === "before" ? "seconds before" : name)));
  const text = (value) => (typeof value === "number" ? figure(value) : String(value ?? "–"));
  return make("div", { class: "wide" }, make("table", { class: "plain" }, make("thead", {}, head),
    make("tbody", {}, ...rows.map((turn, at) => make("tr", {}, make("td", {}, String(at + 1)), ...names.map((name) => make("td", {}, text(turn[name]))))))));
}

// The tokens in two blocks: the prompt's, and from the policy's first token on the response's.
function tokenView(tokens) {
  const shades = SHADES.filter(([name]) => !name || tokens[name]?.some((value) => value !== null));
  if (!shades.some(([name]) => name === shade)) shade = shades[0][0];
  const choice = make("select", {}, ...shades.map(([value, text]) => make("option", { value, selected: value === shade }, text)));
  const pointed = make("p", { class: "token-pointed", role: "status" });
  const spans = tokens.text.map((text, at) => tokenSpan(text, at, tokens));
  const begin = tokens.mask ? tokens.mask.indexOf(1) : -1;
  const blocks = begin > 0 ? [["Prompt", spans.slice(0, begin)], ["Response", spans.slice(begin)]] : [["Tokens", spans]];
  const view = make("div", {}, ...blocks.flatMap(([title, part]) => [
    make("h3", {}, title), make("div", { class: "tokens", tabindex: 0, "aria-label": `${title}; arrow keys go through the tokens` }, ...part)]));
  const scale = make("span", { class: "scale" });
  const paint = () => {
    shade = choice.value;
    scale.replaceChildren(...shadeScale(tokens));
    spans.forEach((span, at) => { span.style.background = background(tokens, at); });
  };
  choice.addEventListener("change", paint);
  paint();
  followTokens(view, spans, tokens, pointed);
  const policy = (tokens.mask || []).filter((value) => value === 1).length;
  return [make("div", { class: "tools" }, make("label", {}, "Shade by ", choice), scale), pointed,
    view, make("p", { class: "hint" }, `${count(tokens.text.length, "token")}${tokens.mask ? `, of which the policy wrote ${digits(policy, 0)}. Grey tokens are the prompt's and the environment's` : ""}.`)];
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

function followTokens(view, spans, tokens, pointed) {
  let now = -1;
  const tell = (at) => {
    spans[now]?.classList.remove("on");
    now = at;
    spans[now]?.classList.add("on");
    pointed.textContent = tokenWords(tokens, at);
  };
  pointed.textContent = `${pointing()} a token to see its values.`;
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
  const words = [`token ${digits(at + 1, 0)}: ${JSON.stringify(tokens.text[at])}`];
  if (tokens.mask) words.push(tokens.mask[at] ? "the policy's" : "not the policy's");
  if (known(logprob)) words.push(`log-probability ${figure(logprob)} (probability ${figure(Math.exp(logprob))})`);
  for (const name of ["advantage", "version"]) {
    const value = tokens[name]?.[at];
    if (known(value)) words.push(`${name} ${figure(value)}`);
  }
  return words.join(", ");
}

const tint = (name, strength) => (strength > 0.01 ? `rgb(var(${name}) / ${(0.6 * Math.min(strength, 1)).toFixed(3)})` : "");
const versionTint = (value) => `color-mix(in srgb, var(--c${Math.abs(value) % PALETTE}) 35%, transparent)`;

// The scale of the shading: boxes with their colours, each with what it stands for.
function shadeScale(tokens) {
  const box = (background_, text) => {
    const mark = make("i", {});
    mark.style.background = background_;
    return make("span", {}, mark, text);
  };
  if (shade === "mask") return [box(tint("--own", 0.5), "policy"), box("", "prompt or environment")];
  if (shade === "logprob") return [1, 0.75, 0.5, 0.25, 0].map((probability) => box(tint("--low", 1 - probability), probability === 1 ? "probability 1" : String(probability)));
  if (shade === "version") return [...new Set(tokens.version.filter(known))].map((value) => box(versionTint(value), `version ${value}`));
  if (shade !== "advantage") return [];
  const most = largest(tokens.advantage);
  return [[-1, "--low"], [-0.5, "--low"], [0, "--low"], [0.5, "--high"], [1, "--high"]].map(([part, name]) => box(tint(name, Math.abs(part)), figure(part * most)));
}

const scales = new WeakMap();

function largest(values) {
  if (!scales.has(values)) scales.set(values, values.reduce((most, value) => Math.max(most, Math.abs(value || 0)), 0));
  return scales.get(values);
}

function background(tokens, at) {
  const value = shade ? tokens[shade]?.[at] : null;
  if (!known(value)) return "";
  if (shade === "logprob") return tint("--low", 1 - Math.exp(value));
  if (shade === "advantage") return tint(value < 0 ? "--low" : "--high", Math.abs(value) / (largest(tokens.advantage) || 1));
  return shade === "mask" ? (value ? tint("--own", 0.5) : "") : versionTint(value);
}

// ---------------------------------------------------------------- the timeline

const LANE = 20;
const TOP = 22;
const BOTTOM = 22;
const DEEPEST = 11;
const MOST_KEYS = 8;
// Calls that are made ahead and mostly wait until the other side has sent, taken or switched to new weights.
const WAITS = new Set(["receive_weights", "send_weights", "resume_weights"]);

class Timeline {
  constructor(data, run) {
    this.data = data;
    this.run = run;
    this.lanes = this.layOut();
    this.canvas = make("canvas", { tabindex: 0, "aria-label": "Timeline; arrow keys move, plus and minus zoom" });
    this.box = make("div", { class: "lanes" }, this.canvas);
    this.pointed = make("p", { class: "pointed", role: "status" }, `${pointing()} a span to see what it is.`);
    this.keys = make("ul", { class: "keys" });
    this.range = make("select", { onchange: () => this.choose() }, ...this.choices().map(([label], at) => make("option", { value: at }, label)));
    const button = (text, label, act) => make("button", { type: "button", "aria-label": label, onclick: act }, text);
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
    return (this.listed ??= [...first, ...groups, ...single.map((step) => [longest(step), step[1], step[2]])]);
  }

  // Spans within another of their track, or beside it, stand below it.
  layOut() {
    const { columns } = this.data;
    const order = [...columns.begin.keys()].sort((a, b) => columns.begin[a] - columns.begin[b] || columns.length[b] - columns.length[a]);
    const open = new Map();
    this.depth = new Array(order.length).fill(0);
    const deepest = new Map();
    for (const span of order) {
      const track = columns.track[span];
      const ends = open.get(track) || [];
      const slack = Math.max(1e-3, columns.length[span] / 100); // times of two processes are not exact
      const free = ends.findIndex((end) => end <= columns.begin[span] + slack);
      this.depth[span] = free < 0 ? ends.length : free;
      ends[this.depth[span]] = columns.begin[span] + columns.length[span];
      open.set(track, ends);
      deepest.set(track, Math.max(deepest.get(track) || 0, Math.min(this.depth[span], DEEPEST)));
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
    const height = this.lanes + TOP + BOTTOM;
    const ratio = devicePixelRatio || 1;
    Object.assign(this.canvas, { width: width * ratio, height: height * ratio });
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    this.drawSteps(context, height);
    this.drawAxis(context, height);
    this.drawSpans(context, width);
    this.drawNames(context, height);
    this.showKeys();
  }

  // The time from the left end of what is shown.
  drawAxis(context, height) {
    const width = this.box.clientWidth;
    const length = this.view[1] - this.view[0];
    const rough = (length * 90) / (width - this.left);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
    const [factor, unit] = length >= 2000 ? [1e-3, "s"] : length >= 0.5 ? [1, "ms"] : [1e3, "µs"];
    const places = decimalsOfStep(step * factor);
    context.fillStyle = variable("--faint");
    context.strokeStyle = variable("--line");
    for (let at = 0; at <= length; at += step) {
      const x = this.position(this.view[0] + at);
      context.beginPath();
      context.moveTo(x, height - BOTTOM);
      context.lineTo(x, height - BOTTOM + 5);
      context.stroke();
      const text = `${digits(at * factor, places)} ${unit}`;
      if (x + context.measureText(text).width + 3 < width) context.fillText(text, x + 3, height - BOTTOM / 2);
    }
  }

  // The names of the spans in view, the longest in sum first.
  showKeys() {
    const { columns, names } = this.data;
    const sums = new Map();
    for (let span = 0; span < columns.begin.length; span += 1) {
      const length = Math.min(columns.begin[span] + columns.length[span], this.view[1]) - Math.max(columns.begin[span], this.view[0]);
      const name = names[columns.name[span]];
      if (length > 0 && !/^step \d+$/.test(name)) sums.set(name, (sums.get(name) || 0) + length);
    }
    const longest = [...sums].sort((a, b) => b[1] - a[1]);
    const items = longest.slice(0, MOST_KEYS).map(([name, sum]) =>
      make("li", {}, swatch({ place: placeOf(name), hatched: WAITS.has(name) }, true), ` ${name}${WAITS.has(name) ? " (mostly waits)" : ""} `, make("output", {}, duration(sum / 1000))));
    if (longest.length > MOST_KEYS) items.push(make("li", { class: "faint" }, `and ${longest.length - MOST_KEYS} shorter`));
    this.keys.replaceChildren(...items);
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
      context.lineTo(x, height - BOTTOM);
      context.stroke();
      const label = step ? `step ${step}` : "start";
      if (x >= free && x + context.measureText(label).width < this.box.clientWidth) {
        context.fillText(label, x + 2, 11);
        free = x + context.measureText(label).width + 8;
      }
    }
  }

  drawSpans(context, width) {
    const { columns, names } = this.data;
    const [begin, end] = this.view;
    const colors = Array.from({ length: PALETTE }, (_, place) => color(place));
    const [ground, neutral, text] = ["--ground", "--faint", "--text"].map(variable);
    for (let span = 0; span < columns.begin.length; span += 1) {
      if (columns.begin[span] > end || columns.begin[span] + columns.length[span] < begin) continue;
      const from = Math.max(this.position(columns.begin[span]), this.left);
      const to = Math.min(this.position(columns.begin[span] + columns.length[span]), width);
      const top = TOP + this.tops[columns.track[span]] + Math.min(this.depth[span], DEEPEST) * LANE;
      const name = names[columns.name[span]];
      context.fillStyle = /^step \d+$/.test(name) ? neutral : colors[placeOf(name)];
      context.globalAlpha = WAITS.has(name) ? 0.3 : 1;
      context.fillRect(from, top, Math.max(to - from - 0.5, 1), LANE - 2);
      context.globalAlpha = 1;
      if (WAITS.has(name)) this.hatch(context, from, to, top);
      if (to - from > 24 && context.measureText(name).width < to - from - 6) {
        context.fillStyle = WAITS.has(name) ? text : ground;
        context.fillText(name, from + 3, top + LANE / 2 - 1);
      }
    }
  }

  hatch(context, from, to, top) {
    context.save();
    context.beginPath();
    context.rect(from, top, to - from, LANE - 2);
    context.clip();
    context.strokeStyle = context.fillStyle;
    context.beginPath();
    for (let x = from - LANE; x < to; x += 7) {
      context.moveTo(x, top + LANE);
      context.lineTo(x + LANE, top);
    }
    context.stroke();
    context.restore();
  }

  drawNames(context, height) {
    context.fillStyle = variable("--panel");
    context.fillRect(0, 0, this.left, height);
    context.fillStyle = variable("--text");
    this.data.tracks.forEach((name, track) => {
      context.fillText(name, 6, TOP + this.tops[track] + LANE / 2, this.left - 10);
    });
  }

  point(event) {
    const { columns, names, tracks } = this.data;
    const at = this.view[0] + ((event.offsetX - this.left) / (this.box.clientWidth - this.left)) * (this.view[1] - this.view[0]);
    const slack = ((this.view[1] - this.view[0]) / (this.box.clientWidth - this.left)) * 2;
    for (let span = 0; span < columns.begin.length; span += 1) {
      const top = TOP + this.tops[columns.track[span]] + Math.min(this.depth[span], DEEPEST) * LANE;
      if (event.offsetY < top || event.offsetY > top + LANE) continue;
      if (at < columns.begin[span] - slack || at > columns.begin[span] + columns.length[span] + slack) continue;
      const details = Object.entries(columns.details[span] || {}).map(([name, value]) => `${name} ${typeof value === "string" ? value : JSON.stringify(value)}`);
      this.pointed.textContent = [`${tracks[columns.track[span]]}: ${names[columns.name[span]]}`, duration(columns.length[span] / 1000), `at ${duration(columns.begin[span] / 1000)}`, ...details].join(", ");
      return;
    }
  }
}

// A name has the same colour in all runs. The names of a step's phases, which meet most often, have the first colours.
const spanPlaces = new Map(["generate", "update", "draw", "reward", "sync", "forward", "receive_weights", "resume_weights"].map((name, place) => [name, place]));

function placeOf(name) {
  if (!spanPlaces.has(name)) spanPlaces.set(name, spanPlaces.size % PALETTE);
  return spanPlaces.get(name);
}

async function showTimelines() {
  const shown = [];
  const made = [];
  for (const number of state.runs.keys()) {
    const data = await timelineOf(number);
    if (!data.steps.length) continue;
    const timeline = new Timeline(data, number);
    if (state.runs.length > 1) shown.push(make("h3", {}, state.runs[number].part.name));
    shown.push(timeline.tools, timeline.box, timeline.keys, timeline.pointed);
    made.push(timeline);
    describeTimeline(data);
  }
  if (LIVE) shown.push(make("button", { type: "button", onclick: () => showTimelines() }, "Read the timeline again"));
  $("timeline-body").replaceChildren(...shown);
  if (!made.length) $("timeline-hint").textContent = "No timeline yet.";
  for (const timeline of made) timeline.choose();
  state.timelines = made;
}

function describeTimeline(data) {
  const spans = data.columns.begin.length;
  const sentences = ["What the controller, the roles and the longest episodes did. Overlapping work of a role stands in rows below each other."];
  if (spans < data.of_spans) {
    sentences.push(`${spans.toLocaleString("en")} of ${data.of_spans.toLocaleString("en")} spans are here, of ${data.steps.length} of ${data.of_steps} steps (the first, the last, the slowest, then the newest); timeline.json opens whole in https://ui.perfetto.dev.`);
  }
  $("timeline-hint").textContent = sentences.join(" ");
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
  $("bands").addEventListener("change", () => { state.bands = $("bands").checked; refreshCharts(); });
  $("more").addEventListener("click", () => $("more").setAttribute("aria-expanded", String($("more").getAttribute("aria-expanded") === "false")));
  $("unzoom").addEventListener("click", () => zoom(null));
  $("metrics-search").addEventListener("input", showMetrics);
  $("metrics-all").addEventListener("toggle", showMetrics);
  addEventListener("hashchange", openMetrics);
  $("tools").addEventListener("submit", (event) => event.preventDefault());
  $("sample").addEventListener("keydown", turnPage);
  $("sample").addEventListener("click", (event) => { if (event.target === $("sample")) $("sample").close(); });
  narrow.addEventListener("change", () => { samplesTable?.makeHead(); samplesTable?.refresh(); });
  addEventListener("resize", () => { clearTimeout(state.resizing); state.resizing = setTimeout(refreshCharts, 120); });
  addEventListener("beforeprint", () => { for (const chart of state.charts) if (!chart.element.hidden && CHARTS.includes(chart.spec)) chart.draw(); });
}

function openMetrics() {
  if (location.hash === "#metrics") $("metrics-all").open = true;
}

// ---------------------------------------------------------------- from the first data on

let samplesTable = null;

function showFigures() {
  state.bands ??= state.runs.length === 1;
  $("bands").checked = state.bands;
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
  showShowcase();
}

async function startReport() {
  state.main = await block("main");
  state.runs = state.main.runs.map(newRun);
  state.runs.forEach((run, number) => take(run, state.main.runs[number]));
  showFigures();
  $("footer").textContent = `Made ${state.main.made} by enginehouse-report ${state.main.version}. This page contacts no host. Charts: uPlot (MIT).`;
  timelineWatcher.observe($("timeline"));
  await new Promise((done) => { requestAnimationFrame(() => setTimeout(done)); });
  const samples = await Promise.all(state.runs.map((run, number) => block(`samples-${number}`)));
  samples.forEach((part, number) => takeSamples(state.runs[number], part));
  showSamples();
  openMetrics();
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
  state.main = { differing: { config: {}, versions: {} } };
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
  const changed = answer.whole || rows > 0 || JSON.stringify(answer.part.facts) !== JSON.stringify(run?.part.facts);
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
      trouble(`\`enginehouse watch\` does not answer (${error.message}). This page shows its last answer.`);
    }
  }
  const ended = state.runs.length && !["running", "not begun"].includes(state.runs[0].part.facts.status);
  setTimeout(pollAgain, ended ? POLL_ENDED_MS : POLL_MS);
}

start().catch((error) => trouble(`This page could not be shown: ${error.message}`));
