"use strict";
// The page: its state, what a key or a click changes, and redrawing what depends on it.

const $ = (id) => document.getElementById(id);
const state = {
  run: 0, layer: 0, group: 0, record: 0, side: "before", shape: "stacked", link: "copies",
};
let runs = [];
const dark = matchMedia("(prefers-color-scheme: dark)");

async function unpack(run) {
  const packed = Uint8Array.from(atob(run.data), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = await new Response(stream).arrayBuffer();
  delete run.data;
  for (const [name, { type, shape, start }] of Object.entries(run.columns)) {
    const count = shape.reduce((a, b) => a * b, 1);
    run[name] = type === "f4" ? new Float32Array(bytes, start, count)
                              : new Int32Array(bytes, start, count);
  }
  // Microbatches of a step lie side by side within it.
  const many = 1 + run.microbatch.reduce((a, b) => Math.max(a, b), 0);
  run.positions = Array.from(run.step, (step, i) => step + run.microbatch[i] / many);
  return run;
}

function element(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

function fillTable(table, head, lines) {
  const rowOf = (cells, tag) => {
    const line = element("tr");
    for (const cell of cells) line.append(cell instanceof Node ? cell : element(tag, cell));
    return line;
  };
  const [thead, tbody] = [element("thead"), element("tbody")];
  thead.append(rowOf(head, "th"));
  for (const cells of lines) tbody.append(rowOf(cells, "td"));
  table.replaceChildren(thead, tbody);
}

function fillSelect(select, names, chosen) {
  select.replaceChildren(...names.map((name, i) => {
    const option = element("option", name);
    option.value = i;
    return option;
  }));
  select.value = chosen;
}

function colors() {
  const style = getComputedStyle(document.documentElement);
  const names = ["page", "card", "text", "line", "before", "after", "copy", "floor"];
  return Object.fromEntries(names.map((n) => [n, style.getPropertyValue(`--${n}`).trim()]));
}

function draw(id, [traces, layout]) {
  // Plotly's own set of buttons has one that uploads the chart.
  const options = { responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "",
                    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };
  // Redrawing keeps the zoom unless the axis means something else.
  layout.uirevision = [state.run, state.layer, state.group].join();
  if (id === "timeline") layout.uirevision = `${state.run}`;
  return Plotly.react(id, traces, layout, options);
}

const groups = (run) => [...new Set(run.group)].sort((a, b) => a - b);

function recordsShown() {
  const run = runs[state.run];
  const group = groups(run)[state.group];
  return Array.from(run.step.keys())
    .filter((i) => run.layer[i] === state.layer && run.group[i] === group);
}

function drawSummary() {
  const run = runs[state.run];
  const values = [["before", run.allBefore], ["after", run.allAfter]];
  const sorted = values.map(([name, all]) => [name, ascending(all)]);
  const shown = Math.max(run.step.length, 1);
  const copies = run.replicaExpert.reduce((n, expert) => n + (expert >= 0), 0) / shown;
  const bytes = run.copyBytes.length ? Math.max(...run.copyBytes) : 0;
  const [before, after] = sorted.map(([, all]) => all);
  const tiles = [
    [times(percentile(before, 50)), "median before"],
    [times(percentile(after, 50)), "median after"],
    [times(percentile(before, 100)), "worst before"],
    [times(percentile(after, 100)), "worst after"],
    [copies.toFixed(1), "copies in a layer and microbatch"],
    [bytes ? megabytes(bytes) : "unknown", "weights of a copy"],
  ];
  $("tiles").replaceChildren(...tiles.map(([value, name]) => {
    const tile = element("div", undefined, "tile");
    tile.append(element("b", value), element("span", name));
    return tile;
  }));
  $("advice").textContent = `Advice, from the least even record: ${run.advice.join("; ")}.`;
  $("advice").hidden = !run.advice.length;
  fillTable($("percentiles"), ["records", "before", "after"], PERCENTILES.map((p) => [
    p === 100 ? "worst" : p === 50 ? "median" : `${p} % are below`,
    ...sorted.map(([, all]) => times3(percentile(all, p))),
  ]));
  draw("histogram", histogram(run.allBefore, run.allAfter, colors()));
}

const times3 = (value) => `${value.toFixed(3)}×`;

function drawComparison() {
  $("comparison").hidden = runs.length < 2;
  if (runs.length < 2) return;
  const all = runs.map((run) => [ascending(run.allBefore), ascending(run.allAfter)]);
  const change = (value, base, i) =>
    i && Number.isFinite(base) ? ` (${value >= base ? "+" : "−"}${Math.abs(value - base).toFixed(3)})` : "";
  const cell = (i, side, p) => {
    const value = percentile(all[i][side], p);
    return times3(value) + change(value, percentile(all[0][side], p), i);
  };
  fillTable($("runs"), ["run", "records", "median before", "worst before", "median after",
                        "99 % are below, after", "worst after"],
    runs.map((run, i) => [run.name, whole(run.records), cell(i, 0, 50), cell(i, 0, 100),
                          cell(i, 1, 50), cell(i, 1, 99), cell(i, 1, 100)]));
  draw("ecdf", cumulative(runs, colors()));
  draw("by-layer", byLayer(runs, colors()));
}

function drawTimeline() {
  const [run, records] = [runs[state.run], recordsShown()];
  for (const [id, on] of [["side-before", state.side === "before"], ["side-after", state.side === "after"],
                          ["shape-stacked", state.shape === "stacked"],
                          ["shape-heatmap", state.shape === "heatmap"]])
    $(id).setAttribute("aria-pressed", on);
  draw("timeline", timeline(run, records, run.positions, state.side, state.shape, colors(),
                            records[state.record]));
}

function drawDetail() {
  const [run, records] = [runs[state.run], recordsShown()];
  const index = records[state.record];
  $("record").max = records.length - 1;
  $("record").value = state.record;
  const microbatches = new Set(run.microbatch).size > 1 ? `, microbatch ${run.microbatch[index]}` : "";
  const where = `step ${run.step[index]}${microbatches}, ${run.layers[state.layer]}`;
  $("record").setAttribute("aria-valuetext", where);
  $("position").textContent = `${state.record + 1} of ${records.length}`;
  $("story").textContent = story(run, index, where);
  for (const kind of ["copies", "tokens"]) $(`link-${kind}`).setAttribute("aria-pressed", state.link === kind);
  draw("ranks", rankBars(run, index, colors()));
  draw("experts", expertBars(run, index, colors()));
  draw("links", linkMap(run, index, state.link, colors()));
  fillCopies(run, index);
}

function copiesOf(run, index) {
  const home = run.experts / run.ranks;
  const [parent, load] = [row(run, "replicaParent", index), row(run, "replicaLoad", index)];
  return Array.from(row(run, "replicaExpert", index), (expert, i) => ({
    expert, home: Math.floor(expert / home), parent: parent[i], load: load[i],
    rank: Math.floor(i / run.slots),
  })).filter((copy) => copy.expert >= 0).sort((a, b) => a.expert - b.expert || a.rank - b.rank);
}

function story(run, index, where) {
  const [before, after] = ["before", "after"].map((name) => row(run, name, index));
  const copies = copiesOf(run, index);
  const relayed = copies.filter((copy) => copy.parent !== copy.home).length;
  const sent = new Array(run.ranks).fill(0);
  for (const copy of copies) sent[copy.parent] += 1;
  const bytes = row(run, "copyBytes", index)[0];
  const start = `${where}: rank ${before.indexOf(Math.max(...before))} would be the busiest, ` +
    `${times(imbalance(before))} the mean of ${whole(sum(before) / run.ranks)} assignments. `;
  if (!copies.length) return `${start}No copy was made.`;
  const rounds = run.rounds[index] > 1 ? ` It took ${run.rounds[index]} rounds.` : "";
  return `${start}${copies.length} copies${bytes ? ` of ${megabytes(bytes)}` : ""}, ` +
    `${relayed} of them relayed by another rank than the home, make it ${times(imbalance(after))}. ` +
    `No rank sends more than ${Math.max(...sent)}.${rounds}`;
}

function fillCopies(run, index) {
  const bytes = row(run, "copyBytes", index)[0];
  fillTable($("copies"), ["expert", "home", "sent by", "runs on", "assignments", "weights"],
    copiesOf(run, index).map((copy) => {
      const relay = copy.parent !== copy.home;
      const sender = element("td", `${relay ? "relay " : ""}${copy.parent}`, relay ? "via" : "");
      return [copy.expert, copy.home, sender, copy.rank, whole(copy.load),
              bytes ? megabytes(bytes) : "?"];
    }));
}

function drawRun() {
  const run = runs[state.run];
  const many = groups(run);
  state.layer = Math.min(state.layer, run.layers.length - 1);
  state.group = Math.min(state.group, many.length - 1);
  state.record = Math.max(0, Math.min(state.record, recordsShown().length - 1));
  $("title").textContent = run.name;
  const facts = [`${run.ranks} ranks`, `${run.experts} experts`, `${run.slots} replica slots a rank`,
                 `${whole(run.records)} records of ${whole(run.steps)} steps`];
  for (const [name, value] of Object.entries({ ...run.config, ...run.metadata }))
    if (["strategy", "objective", "target", "domain_size"].includes(name) || name in run.metadata)
      if (value !== "None") facts.push(`${name.replaceAll("_", " ")} ${value}`);
  if (!run.measured) facts.push("after: as planned on import, not measured");
  $("facts").textContent = facts.join(" · ");
  $("problems").hidden = !run.problems.length;
  $("problems").replaceChildren(...run.problems.map((text) => element("p", `Left out: ${text}`)));
  $("run-field").hidden = runs.length < 2;
  $("group-field").hidden = many.length < 2;
  fillSelect($("layer"), run.layers, state.layer);
  fillSelect($("group"), many.map(String), state.group);
  fillSelect($("run"), runs.map((r) => r.name), state.run);
  $("shown").textContent = run.shownSteps < run.steps
    ? `${whole(run.shownSteps)} of ${whole(run.steps)} steps, evenly chosen; for others see view --steps` : "";
  drawSummary();
  drawTimeline();
  drawDetail();
}

function choose(changes) {
  Object.assign(state, changes);
  if ("run" in changes || "layer" in changes || "group" in changes) drawRun();
  else {
    drawTimeline();
    drawDetail();
  }
}

const step = (by, value, count) => Math.max(0, Math.min(count - 1, value + by));

const actions = {
  side: () => choose({ side: state.side === "before" ? "after" : "before" }),
  shape: () => choose({ shape: state.shape === "stacked" ? "heatmap" : "stacked" }),
  link: () => choose({ link: state.link === "copies" ? "tokens" : "copies" }),
  record: (by) => choose({ record: step(by, state.record, recordsShown().length) }),
  layer: (by) => choose({ layer: step(by, state.layer, runs[state.run].layers.length) }),
  run: () => choose({ run: (state.run + 1) % runs.length }),
  theme: () => setTheme(document.documentElement.dataset.theme !== "dark"),
  zoom: (factor) => {
    const axis = $("timeline").layout.xaxis;
    const [low, high] = axis.range;
    const middle = (low + high) / 2;
    const half = ((high - low) / 2) * factor;
    Plotly.relayout("timeline", factor ? { "xaxis.range": [middle - half, middle + half] }
                                       : { "xaxis.autorange": true });
  },
};

function setTheme(isDark) {
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  $("theme").textContent = isDark ? "Light" : "Dark";
  if (!runs.length) return;
  drawRun();
  drawComparison();
}

const KEYS = {
  b: () => actions.side(), h: () => actions.shape(), l: () => actions.link(),
  r: () => actions.run(), t: () => actions.theme(),
  ArrowLeft: () => actions.record(-1), ArrowRight: () => actions.record(1),
  ArrowUp: () => actions.layer(-1), ArrowDown: () => actions.layer(1),
  "+": () => actions.zoom(0.5), "=": () => actions.zoom(0.5), "-": () => actions.zoom(2),
  0: () => actions.zoom(0),
};

function listen() {
  const on = (id, event, handler) => $(id).addEventListener(event, handler);
  on("run", "change", (e) => choose({ run: Number(e.target.value) }));
  on("layer", "change", (e) => choose({ layer: Number(e.target.value) }));
  on("group", "change", (e) => choose({ group: Number(e.target.value) }));
  on("record", "input", (e) => choose({ record: Number(e.target.value) }));
  for (const side of ["before", "after"]) on(`side-${side}`, "click", () => choose({ side }));
  for (const shape of ["stacked", "heatmap"]) on(`shape-${shape}`, "click", () => choose({ shape }));
  for (const link of ["copies", "tokens"]) on(`link-${link}`, "click", () => choose({ link }));
  on("previous", "click", () => actions.record(-1));
  on("next", "click", () => actions.record(1));
  on("zoom-in", "click", () => actions.zoom(0.5));
  on("zoom-out", "click", () => actions.zoom(2));
  on("zoom-reset", "click", () => actions.zoom(0));
  on("theme", "click", actions.theme);
  dark.addEventListener("change", () => setTheme(dark.matches));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.target.closest("select, input, textarea") && event.key !== "Escape") return;
    // Arrows scroll a table that has the focus.
    if (event.target.closest(".table") && event.key.startsWith("Arrow")) return;
    const action = KEYS[event.key];
    if (action) {
      event.preventDefault();
      action();
    }
  });
  $("timeline").on("plotly_click", ({ points }) => {
    const [run, records] = [runs[state.run], recordsShown()];
    const at = records.findIndex((i) => run.positions[i] === points[0].x);
    if (at >= 0) choose({ record: at });
  });
}

async function start() {
  const data = JSON.parse($("data").textContent);
  runs = await Promise.all(data.runs.map(unpack));
  for (const table of document.querySelectorAll(".table")) table.tabIndex = 0;
  setTheme(dark.matches);
  // The record with the most to see: the least even one.
  const records = recordsShown();
  const skew = records.map((i) => imbalance(row(runs[0], "before", i)));
  choose({ record: skew.indexOf(Math.max(...skew)) });
  listen();
  document.body.dataset.ready = "true";
}

start().catch((error) => {
  const place = $("problems");
  place.hidden = false;
  place.append(element("p", `The page cannot show its data: ${error.message}`));
});
