"use strict";
// Follows the console's events and draws them. Text always enters the page as text, never as HTML.

const POINTS_MAX = 2048;
const NONE = "\u2013";
const SILENT_S = 15; // a worker that was not heard for longer is marked
const WIDTH = 600, HEIGHT = 120;

let points = [];
const charts = new Map();

const byId = (id) => document.getElementById(id);
const known = (value) => value !== null && value !== undefined;

function element(name, content, classes) {
  const made = document.createElement(name);
  if (classes) made.className = classes;
  if (known(content)) made.append(...[content].flat());
  return made;
}

// ---- numbers as text ----

function count(number) {
  if (!known(number)) return NONE;
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (number >= size) return `${(number / (unit === "k" ? 1e3 : size)).toFixed(1)}${unit}`;
  }
  return Number.isInteger(number) ? String(number) : number.toFixed(1);
}

function size(bytes) {
  if (!known(bytes)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  for (; bytes >= 1024 && unit < units.length - 1; unit++) bytes /= 1024;
  return `${unit ? bytes.toFixed(1) : bytes.toFixed(0)} ${units[unit]}`;
}

function span(seconds) {
  if (!known(seconds)) return NONE;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  return hours ? `${hours} h ${minutes % 60} min` : `${minutes} min ${Math.floor(seconds % 60)} s`;
}

const ms = (seconds) => (known(seconds) ? `${(1000 * seconds).toFixed(2)} ms` : NONE);
const percent = (share) => (known(share) ? `${(100 * share).toFixed(1)} %` : NONE);
const figure = (value) => (known(value) ? value.toPrecision(4) : NONE);
// The console counts seconds since its start; the clock is this browser's.
let startedAt = 0;
const clock = (at) => new Date(startedAt + 1000 * at).toLocaleTimeString();
const note = (at) => { startedAt = Date.now() - 1000 * at; };

// ---- what there is now ----

function showNow(job) {
  const rows = job.tables.reduce((sum, table) => sum + table.num_rows, 0);
  const bytes = job.tables.reduce((sum, table) => sum + table.num_bytes, 0);
  const cells = [
    ["examples/s", count(job.examples_per_s)],
    ["examples", count(job.num_examples)],
    ["rows", count(rows)],
    ["tables", size(bytes)],
    ["workers", count(job.workers.length)],
    ["servers", count(job.servers.length)],
  ];
  const shown = job.workers.find((worker) => Object.keys(worker.figures).length);
  for (const [name, value] of Object.entries(shown ? shown.figures : {})) {
    cells.push([name, figure(value)]);
  }
  if (job.staleness) cells.push(["staleness, mean", job.staleness.mean.toFixed(2)]);
  byId("now").replaceChildren(
    ...cells.map(([name, value]) => element("div", [element("dt", name), element("dd", value)])),
  );
}

// A table: columns are [title, text of an item, whether it is marked].
function showTable(id, items, columns, none) {
  if (!items.length) return byId(id).replaceChildren(element("p", none, "none"));
  const head = element("tr", columns.map(([title]) => {
    const cell = element("th", title);
    cell.scope = "col";
    return cell;
  }));
  const rows = items.map((item) => element("tr", columns.map(([, text, marks], column) => {
    const cell = element(column ? "td" : "th", text(item), marks && marks(item) ? "bad" : "");
    if (!column) cell.scope = "row";
    return cell;
  })));
  byId(id).replaceChildren(
    element("table", [element("thead", head), element("tbody", rows)]),
  );
}

function showTables(job) {
  showTable("workers", job.workers, [
    ["worker", (w) => w.worker],
    ["heard ago", (w) => span(w.silence_s), (w) => w.silence_s > SILENT_S],
    ["steps", (w) => count(w.num_steps)],
    ["examples", (w) => count(w.num_examples)],
    ["examples/s", (w) => count(w.examples_per_s)],
    ["retries", (w) => count(w.reported.retries), (w) => w.reported.retries > 0],
    ["planned", (w) => count(w.reported.planned)],
    ["pulled", (w) => count(w.reported.pulled)],
    ["pushes", (w) => count(w.reported.pushes)],
  ], "No worker has connected yet.");
  byId("labels-part").hidden = !job.labels.length;
  showTable("labels", job.labels, [
    ["label", (l) => l.label],
    ["reachable", (l) => `${count(l.num_reachable)} of ${count(l.num_compute_workers)}`,
      (l) => l.num_reachable < l.num_compute_workers],
    ["credits", (l) => count(l.num_credits)],
    ["in flight", (l) => count(l.num_in_flight)],
    ["batches/s", (l) => count(l.batches_per_s)],
    ["a batch", (l) => ms(l.batch_s)],
    ["busy", (l) => percent(l.busy_share)],
    ["failovers", (l) => count(l.num_failovers), (l) => l.num_failovers > 0],
    ["who waits", (l) => l.waiting || NONE],
  ], "There are none.");
  showTable("servers", job.servers, [
    ["server", (s) => s.endpoint],
    ["up", (s) => (s.error ? "no answer" : span(s.up_s)), (s) => s.error],
    ["rows", (s) => count(s.num_rows)],
    ["tables", (s) => size(s.table_bytes)],
    ["memory", (s) => size(s.process_bytes)],
    ["pulls/s", (s) => count(s.pulls_per_s)],
    ["pushes/s", (s) => count(s.pushes_per_s)],
    ["pull", (s) => ms(s.pull_s)],
    ["push", (s) => ms(s.push_s)],
    ["staleness", (s) => (known(s.staleness) ? s.staleness.toFixed(2) : NONE)],
    ["waits for", (s) => s.waits.join("; ") || NONE],
    ["in/s", (s) => size(s.received_per_s)],
    ["out/s", (s) => size(s.sent_per_s)],
    ["queued", (s) => count(s.num_queued)],
    ["deferred", (s) => count(s.num_deferred)],
    ["full/s", (s) => count(s.full_per_s), (s) => s.full_per_s > 0],
    ["saved ago", (s) => span(s.saved_ago_s)],
    ["log", (s) => size(s.log_bytes)],
    ["log age", (s) => span(s.log_age_s)],
  ], "No server has answered yet.");
  showTable("tables", job.tables, [
    ["table", (t) => t.name],
    ["rows", (t) => count(t.num_rows)],
    ["bytes", (t) => size(t.num_bytes)],
    ["pulled keys/s", (t) => count(t.pulled_per_s)],
    ["missing", (t) => percent(t.missing_share)],
    ["pushed keys/s", (t) => count(t.pushed_per_s)],
  ], "No table has been made yet.");
  const tiered = job.tables.filter((table) => table.tier);
  byId("tiers-part").hidden = !tiered.length;
  showTable("tiers", tiered, [
    ["table", (t) => t.name],
    ["in memory", (t) => count(t.tier.num_in_memory)],
    ["on SSD", (t) => count(t.tier.num_on_ssd)],
    ["budget", (t) => size(t.tier.memory_bytes)],
    ["files", (t) => size(t.tier.file_bytes)],
    ["hits", (t) => percent(t.tier.hit_share)],
    ["reads/s", (t) => count(t.tier.reads_per_s)],
    ["fetched/s", (t) => count(t.tier.fetched_per_s)],
    ["evicted/s", (t) => count(t.tier.evicted_per_s)],
    ["written", (t) => (known(t.tier.written) ? `${t.tier.written.toFixed(2)}x` : NONE)],
  ], "There are none.");
}

// ---- rows ----

const KINDS = {
  show: ["shows", (bound) => count(bound)],
  age_s: ["age", (bound) => age(bound)],
  version: ["last change, saves ago", (bound) => count(bound)],
};

function age(seconds) {
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= size) return `${seconds / size} ${unit}`;
  }
  return `${seconds} s`;
}

function histogram(table, { kind, from_: bounds, rows }) {
  const [title, text] = KINDS[kind];
  const most = Math.max(...rows, 1), all = rows.reduce((sum, n) => sum + n, 0);
  const bars = rows.flatMap((number, i) => {
    const drawing = svg("svg", {
      viewBox: `0 0 ${WIDTH} 10`, preserveAspectRatio: "none", "aria-hidden": "true",
    });
    drawing.append(svg("rect", {
      class: "bar", x: 0, y: 0, height: 10, width: ((WIDTH * number) / most).toFixed(1),
    }));
    const from = `${text(bounds[i])}${i + 1 < bounds.length ? ` \u2013 ${text(bounds[i + 1])}` : " +"}`;
    return [element("span", from, "bound"), drawing, element("span", percent(all ? number / all : 0))];
  });
  const drawn = element("figure", [
    element("figcaption", [
      element("span", [`${table.table} `, element("span", title, "kind")], "name"),
      element("span", seen(table), "value"),
    ]),
    element("div", bars, "bars"),
  ]);
  return drawn;
}

function seen(table) {
  const all = table.num_sampled >= table.num_in_memory;
  const rows = `${count(table.num_sampled)}${all ? "" : ` of ${count(table.num_in_memory)}`} rows`;
  const onSsd = table.num_on_ssd ? `; ${count(table.num_on_ssd)} on SSD` : "";
  return `${rows}${onSsd}${table.num_silent ? `; without ${table.num_silent} silent servers` : ""}`;
}

function showDistributions(tables) {
  byId("rows-part").hidden = !tables.some((table) => table.bars.length);
  byId("distributions").replaceChildren(
    ...tables.flatMap((table) => table.bars.map((bars) => histogram(table, bars))),
  );
}

let namesShown = "";
function offerNames(tables) {
  const names = tables.map((table) => table.name);
  if (names.join("\n") === namesShown) return;
  namesShown = names.join("\n");
  byId("table-names").replaceChildren(...names.map((name) => {
    const option = element("option");
    option.value = name;
    return option;
  }));
  if (!byId("look-table").value && names.length) byId("look-table").value = names[0];
}

const PLACES = { none: "no row: a lookup gives initial weights", memory: "in memory", ssd: "on SSD" };
// Each by itself: a line must not end within 1e-12.
const floats = (values) => values.flatMap((value) => (
  [element("span", known(value) ? value.toPrecision(6) : "NaN"), " "]
));
const time = (seconds) => (seconds ? new Date(1000 * seconds).toISOString().replace(".000", "") : "none");

function showRow(found) {
  const cells = [["row", found.row], ["key", found.key], ["place", PLACES[found.place]], ["server", found.server]];
  const lists = [];
  if (found.place !== "none") {
    for (const name of ["show", "click", "delta_score", "feature"]) {
      if (known(found[name])) cells.push([name, String(Number(found[name].toPrecision(7)))]);
    }
    cells.push(["last push", time(found.time)], ["changed in save", String(found.version)]);
    if (found.updates.length) cells.push(["updates", found.updates.join(" ")]);
    lists.push([`weights (${found.weights.length})`, found.weights]);
    if (found.state.length) lists.push([`state of ${found.rule} (${found.state.length})`, found.state]);
  }
  const pairs = cells.map(([name, value]) => element("div", [element("dt", name), element("dd", value)]));
  for (const [name, values] of lists) {
    const numbers = element("dd", floats(values), "numbers");
    numbers.tabIndex = 0; // to scroll it
    numbers.ariaLabel = name;
    pairs.push(element("div", [element("dt", name), numbers]));
  }
  byId("row").replaceChildren(element("div", element("dl", pairs), "wide"));
}

async function look(event) {
  event.preventDefault();
  const wanted = new URLSearchParams({ table: byId("look-table").value, row: byId("look-row").value });
  let answer, found;
  try {
    answer = await fetch(`/row?${wanted}`);
    found = await answer.json();
  } catch {
    found = { error: "the console does not answer" };
  }
  if (found.error) byId("row").replaceChildren(element("p", found.error, "error"));
  else showRow(found);
}

// ---- charts ----

function svg(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

class Chart {
  constructor(name, read, text, fromZero) {
    this.fromZero = fromZero;
    this.name = name; this.read = read; this.text = text; this.cursorAt = null;
    this.value = element("span", NONE, "value");
    this.drawing = svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
    });
    this.low = element("span"); this.span = element("span"); this.high = element("span");
    byId("charts").append(element("figure", [
      element("figcaption", [element("span", name, "name"), this.value]),
      this.drawing,
      element("div", [this.low, this.span, this.high], "bounds"),
    ]));
    this.drawing.addEventListener("pointermove", (event) => {
      const box = this.drawing.getBoundingClientRect();
      this.cursorAt = (event.clientX - box.left) / box.width;
      this.draw();
    });
    this.drawing.addEventListener("pointerleave", () => { this.cursorAt = null; this.draw(); });
  }

  draw() {
    const seen = points.map((point) => [point.at, this.read(point)]).filter(([, v]) => known(v));
    if (!seen.length) return;
    const values = seen.map(([, value]) => value);
    const [begin, end] = [seen[0][0], seen[seen.length - 1][0]];
    let low = Math.min(...values), high = Math.max(...values);
    const [least, most] = [low, high];
    if (this.fromZero) low = 0;
    if (low === high) { low -= this.fromZero ? 0 : Math.abs(low) / 2 || 1; high += Math.abs(high) / 2 || 1; }
    const x = (at) => (end > begin ? (WIDTH * (at - begin)) / (end - begin) : WIDTH);
    const y = (value) => HEIGHT - 4 - ((HEIGHT - 8) * (value - low)) / (high - low);
    const places = seen.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`);
    if (begin === end) places.unshift(`0,${y(values[0]).toFixed(1)}`); // a point alone is not seen
    const line = places.join("L");
    const [first, last] = [begin === end ? 0 : x(begin).toFixed(1), x(end).toFixed(1)];
    this.drawing.replaceChildren(
      svg("path", { class: "grid", d: `M0,${HEIGHT - 1}H${WIDTH}M0,${HEIGHT / 2}H${WIDTH}` }),
      svg("path", { class: "area", d: `M${first},${HEIGHT}L${line}L${last},${HEIGHT}Z` }),
      svg("path", { class: "line", d: `M${line}` }),
    );
    const latest = seen[seen.length - 1];
    let told = this.text(latest[1]);
    if (this.cursorAt !== null) {
      const at = begin + this.cursorAt * (end - begin);
      const near = seen.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a));
      this.drawing.append(svg("path", { class: "cursor", d: `M${x(near[0])},0V${HEIGHT}` }));
      told = `${this.text(near[1])} at ${clock(near[0])}`;
    }
    this.value.textContent = told;
    this.low.textContent = `min ${this.text(least)}`;
    this.span.textContent = `${clock(begin)} to ${clock(end)}`;
    this.high.textContent = `max ${this.text(most)}`;
    this.drawing.setAttribute(
      "aria-label",
      `${this.name} from ${clock(begin)} to ${clock(end)}: now ${this.text(latest[1])}, ` +
        `least ${this.text(least)}, most ${this.text(most)}`,
    );
  }
}

function chart(name, read, text, fromZero = false) {
  if (!charts.has(name) && points.some((point) => known(read(point)))) {
    charts.set(name, new Chart(name, read, text, fromZero));
  }
}

function drawCharts() {
  chart("examples/s", (point) => point.examples_per_s, count, true);
  const names = new Set(points.flatMap((point) => Object.keys(point.figures)));
  for (const name of names) chart(name, (point) => point.figures[name], figure);
  chart("rows", (point) => point.num_rows, count, true);
  chart("a pull, slowest server", (point) => point.pull_s, ms, true);
  chart("a push, slowest server", (point) => point.push_s, ms, true);
  chart("hits in memory", (point) => point.hit_share, percent);
  for (const drawn of charts.values()) drawn.draw();
}

function add(point) {
  points.push(point);
  if (points.length >= POINTS_MAX) points = points.filter((_, index) => index % 2 === 0);
}

// ---- events ----

function say(text, kind) {
  byId("state").textContent = text;
  byId("state").className = kind;
}

function follow() {
  const events = new EventSource("/events");
  events.addEventListener("history", (event) => {
    points = JSON.parse(event.data);
  });
  events.addEventListener("job", (event) => {
    const { job, point, distributions } = JSON.parse(event.data);
    note(point.at);
    const without = job.servers.filter((server) => server.error).length;
    add(point);
    say(
      without ? `${without} of ${job.servers.length} servers do not answer`
        : `runs, as of ${clock(point.at)}`,
      without ? "bad" : "good",
    );
    showNow(job);
    showTables(job);
    showDistributions(distributions);
    offerNames(job.tables);
    drawCharts();
  });
  events.addEventListener("silent", (event) => {
    const { at, error } = JSON.parse(event.data);
    note(at);
    say(`no server answers since before ${clock(at)}: the job has ended or cannot be reached. ${error}`,
      "bad");
  });
  events.addEventListener("error", () => say("the console does not answer; trying again", "bad"));
}

byId("look").addEventListener("submit", look);
follow();
