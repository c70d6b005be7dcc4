"use strict";
// What to draw: from a run's columns to Plotly's traces and layouts. No state, no document.

const PERCENTILES = [5, 50, 90, 95, 99, 100];

// Plotly reads a little HTML in its texts; names of runs and layers are no HTML.
const plain = (text) =>
  String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const times = (value) => `${value.toFixed(value < 10 ? 2 : 1)}×`;
const whole = (value) => Math.round(value).toLocaleString("en");
const sum = (values) => values.reduce((total, value) => total + value, 0);
const megabytes = (bytes) => {
  const unit = bytes >= 1e6 ? [1e6, "MB"] : bytes >= 1e3 ? [1e3, "kB"] : [1, "B"];
  return `${(bytes / unit[0]).toPrecision(3)} ${unit[1]}`;
};

function percentile(sorted, percent) {
  if (!sorted.length) return NaN;
  const place = ((sorted.length - 1) * percent) / 100;
  const low = Math.floor(place);
  const high = Math.min(low + 1, sorted.length - 1);
  return sorted[low] + (place - low) * (sorted[high] - sorted[low]);
}

const ascending = (values) => Float64Array.from(values).sort();

// A row of a column, e.g. the loads of the ranks in one record.
function row(run, name, index) {
  const shape = run.columns[name].shape;
  const size = shape.slice(1).reduce((a, b) => a * b, 1);
  return run[name].subarray(index * size, (index + 1) * size);
}

function imbalance(loads) {
  const mean = sum(loads) / loads.length;
  return mean ? Math.max(...loads) / mean : 1;
}

// From dark to light, told apart without colour too.
const SCALE = ["#30286f", "#2a5a9c", "#1f8a9b", "#38b283", "#9bd15a", "#f4e15b"];

function rankColor(rank, ranks) {
  const place = ranks > 1 ? (rank / (ranks - 1)) * (SCALE.length - 1) : 0;
  const low = Math.min(Math.floor(place), SCALE.length - 2);
  const parts = [1, 3, 5].map((at) => {
    const [a, b] = [SCALE[low], SCALE[low + 1]].map((c) => parseInt(c.slice(at, at + 2), 16));
    return Math.round(a + (place - low) * (b - a));
  });
  return `rgb(${parts})`;
}

function layout(colors, changes) {
  const axis = {
    gridcolor: colors.line, zerolinecolor: colors.line, linecolor: colors.line, automargin: true,
    title: { standoff: 8 },
  };
  const base = {
    paper_bgcolor: colors.card, plot_bgcolor: colors.card,
    font: { color: colors.text, family: 'system-ui, "DejaVu Sans", sans-serif', size: 13 },
    // The toolbar is above a narrow chart, so the legend goes below; names of runs can be long.
    margin: { l: 56, r: 16, t: 34, b: 90 }, legend: { orientation: "h", y: -0.24, yanchor: "top" },
    hoverlabel: { bgcolor: colors.page, bordercolor: colors.line, font: { color: colors.text } },
    ...changes,
  };
  for (const name of Object.keys(base).filter((key) => /^[xy]axis/.test(key)))
    base[name] = { ...axis, ...base[name], title: { standoff: 8, text: base[name].title } };
  return base;
}

function histogram(before, after, colors) {
  const top = Math.max(1.05, ...[before, after].map((v) => v.reduce((a, b) => Math.max(a, b), 1)));
  const size = (top - 1) / 40;
  const trace = (x, name, color) => ({
    type: "histogram", x, name, marker: { color }, opacity: 0.75, histnorm: "percent",
    xbins: { start: 1 - size / 2, end: top + size, size },
    hovertemplate: `${name}: %{y:.1f} % of the records near %{x:.2f}×<extra></extra>`,
  });
  return [
    [trace(before, "before", colors.before), trace(after, "after", colors.after)],
    layout(colors, {
      barmode: "overlay", xaxis: { title: "busiest / mean rank" }, yaxis: { title: "% of records" },
    }),
  ];
}

function timeline(run, records, positions, side, shape, colors, chosen) {
  const [x, loads] = [records.map((i) => positions[i]), records.map((i) => row(run, side, i))];
  const traces = [];
  if (shape === "heatmap") {
    const z = Array.from({ length: run.ranks }, (_, rank) =>
      loads.map((values) => (values[rank] * values.length) / Math.max(sum(values), 1)));
    traces.push({
      type: "heatmap", x, z, zmin: 0, zmid: 1, zmax: 2, xgap: 0, ygap: run.ranks <= 32 ? 1 : 0,
      colorscale: [[0, colors.after], [0.5, colors.card], [1, colors.before]],
      colorbar: { title: { text: "× mean" }, thickness: 12, len: 0.6, y: 0.69 },
      hovertemplate: "step %{x}, rank %{y}: %{z:.2f} × mean<extra></extra>",
    });
  } else {
    const bars = records.length <= 80;
    for (let rank = 0; rank < run.ranks; rank++) {
      const color = rankColor(rank, run.ranks);
      const y = loads.map((values) => values[rank]);
      const common = {
        x, y, name: `rank ${rank}`,
        hovertemplate: `step %{x}, rank ${rank}: %{y:,} assignments<extra></extra>`,
      };
      traces.push(bars
        ? { ...common, type: "bar", marker: { color, line: { color: colors.card, width: 0.5 } } }
        : { ...common, type: "scatter", mode: "lines", stackgroup: "ranks", fillcolor: color,
            line: { color: colors.card, width: 0.4 } });
    }
  }
  for (const name of ["before", "after"])
    traces.push({
      type: "scatter", mode: records.length > 1 ? "lines" : "markers", name, x, yaxis: "y2",
      y: records.map((i) => imbalance(row(run, name, i))), showlegend: false,
      line: { color: colors[name], width: name === side ? 2.5 : 1.2 },
      hovertemplate: `step %{x}: %{y:.3f}× ${name}<extra></extra>`,
    });
  return [traces, layout(colors, {
    legend: { orientation: "h", y: -0.14, yanchor: "top" },
    barmode: "stack", bargap: 0.05, showlegend: shape === "stacked" && run.ranks <= 16,
    hovermode: "closest", dragmode: "zoom",
    xaxis: { title: "step", anchor: "y2" },
    yaxis: { title: shape === "heatmap" ? "rank" : `assignments ${side}`, domain: [0.36, 1],
             fixedrange: true, dtick: shape === "heatmap" && run.ranks <= 16 ? 1 : undefined },
    yaxis2: { title: "busiest / mean", domain: [0, 0.28], rangemode: "tozero", fixedrange: true },
    shapes: [{ type: "line", x0: positions[chosen], x1: positions[chosen], yref: "paper", y0: 0,
               y1: 1, line: { color: colors.text, width: 1.5, dash: "dot" } }],
  })];
}

// What each rank computes, of its own experts and of copies.
function copiedLoads(run, index) {
  const copied = new Array(run.ranks).fill(0);
  row(run, "replicaLoad", index).forEach((load, i) => { copied[Math.floor(i / run.slots)] += load; });
  return copied;
}

function rankBars(run, index, colors) {
  const [before, after] = ["before", "after"].map((name) => Array.from(row(run, name, index)));
  const copied = copiedLoads(run, index);
  const x = before.map((_, rank) => rank);
  const mean = sum(before) / run.ranks;
  const bar = (y, name, color) => ({
    type: "bar", x, y, name, marker: { color },
    hovertemplate: `rank %{x}: %{y:,} of ${name}<extra></extra>`,
  });
  return [[
    bar(after.map((load, rank) => load - copied[rank]), "home experts", colors.after),
    bar(copied, "copies", colors.copy),
    { type: "scatter", mode: "markers", x, y: before, name: "before",
      marker: { symbol: "line-ew", size: Math.max(6, Math.min(28, 340 / run.ranks)),
                line: { width: 3, color: colors.before } },
      hovertemplate: "rank %{x}: %{y:,} before<extra></extra>" },
  ], layout(colors, {
    barmode: "stack", xaxis: { title: "rank", dtick: run.ranks <= 16 ? 1 : undefined },
    yaxis: { title: "assignments", rangemode: "tozero" },
    shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: mean, y1: mean,
               line: { color: colors.floor, width: 1.5, dash: "dash" } }],
    annotations: [{ xref: "paper", x: 1, xanchor: "right", y: mean, yanchor: "bottom", text: "mean",
                    showarrow: false, font: { color: colors.floor } }],
  })];
}

function expertBars(run, index, colors) {
  const load = row(run, "expertLoad", index);
  const served = new Array(run.experts).fill(0);
  const copies = new Array(run.experts).fill(0);
  const tokens = row(run, "replicaLoad", index);
  row(run, "replicaExpert", index).forEach((expert, slot) => {
    if (expert >= 0) { served[expert] += tokens[slot]; copies[expert] += 1; }
  });
  const top = Array.from(load.keys()).sort((a, b) => load[b] - load[a] || a - b).slice(0, 40);
  const x = top.map(String);
  const bar = (y, name, color) => ({
    type: "bar", x, y, name, marker: { color },
    customdata: top.map((e) => [Math.floor(e / (run.experts / run.ranks)), copies[e]]),
    hovertemplate: `expert %{x} (home rank %{customdata[0]}, %{customdata[1]} copies): ` +
      `%{y:,} ${name}<extra></extra>`,
  });
  return [[
    bar(top.map((e) => load[e] - served[e]), "at home", colors.after),
    bar(top.map((e) => served[e]), "on copies", colors.copy),
  ], layout(colors, {
    barmode: "stack", yaxis: { title: "assignments" },
    xaxis: { type: "category",
             title: run.experts > 40 ? "the 40 busiest experts" : "experts, busiest first" },
  })];
}

// Bytes, or assignments where the bytes are not known, from rank to rank.
function linkMatrix(run, index, kind) {
  const matrix = Array.from({ length: run.ranks }, () => new Array(run.ranks).fill(0));
  if (kind === "copies") {
    const bytes = row(run, "copyBytes", index)[0];
    row(run, "replicaParent", index).forEach((parent, i) => {
      if (parent >= 0) matrix[parent][Math.floor(i / run.slots)] += bytes || 1;
    });
    return [matrix, bytes ? "bytes" : "copies"];
  }
  row(run, "links", index).forEach((count, i) => {
    const [source, host] = [Math.floor(i / run.ranks), i % run.ranks];
    if (source !== host) matrix[source][host] = count * (run.tokenBytes || 1);
  });
  return [matrix, run.tokenBytes ? "bytes" : "assignments"];
}

function linkMap(run, index, kind, colors) {
  const [matrix, unit] = linkMatrix(run, index, kind);
  const told = unit === "bytes" ? megabytes : (value) => `${whole(value)} ${unit}`;
  return [[{
    type: "heatmap", z: matrix, xgap: run.ranks <= 32 ? 1 : 0, ygap: run.ranks <= 32 ? 1 : 0,
    colorscale: [[0, colors.page], [1, kind === "copies" ? colors.copy : colors.after]],
    zmin: 0, text: matrix.map((line) => line.map(told)), colorbar: { thickness: 12, title: { text: unit } },
    hovertemplate: "rank %{y} to rank %{x}: %{text}<extra></extra>",
  }], layout(colors, {
    margin: { l: 56, r: 16, t: 34, b: 44 },
    xaxis: { title: "to rank", dtick: run.ranks <= 16 ? 1 : undefined },
    yaxis: { title: "from rank", autorange: "reversed", dtick: run.ranks <= 16 ? 1 : undefined },
  })];
}

const DASHES = ["solid", "dash", "dot", "dashdot"];
const SHAPES = ["", "/", "x", "."];

function cumulative(runs, colors) {
  const traces = runs.flatMap((run, i) => ["before", "after"].map((side) => {
    const values = ascending(side === "before" ? run.allBefore : run.allAfter);
    const points = Array.from({ length: 201 }, (_, k) => k / 2);
    return {
      type: "scatter", mode: "lines", name: `${plain(run.name)}, ${side}`,
      x: points.map((p) => percentile(values, p)), y: points,
      line: { color: colors[side], dash: DASHES[i % DASHES.length], width: 2 },
      hovertemplate: `%{y} % of the records are below %{x:.3f}×<extra>%{fullData.name}</extra>`,
    };
  }));
  return [traces, layout(colors, {
    xaxis: { title: "busiest / mean rank" }, yaxis: { title: "% of records below" },
  })];
}

function byLayer(runs, colors) {
  const traces = runs.flatMap((run, i) => ["before", "after"].map((side) => {
    const values = side === "before" ? run.allBefore : run.allAfter;
    const means = run.layers.map((_, layer) => {
      const chosen = values.filter((_, k) => run.allLayer[k] === layer);
      return sum(chosen) / Math.max(chosen.length, 1);
    });
    return {
      type: "bar", name: `${plain(run.name)}, ${side}`, x: run.layers.map(plain), y: means,
      marker: { color: colors[side], pattern: { shape: SHAPES[i % SHAPES.length] } },
      hovertemplate: "%{x}: %{y:.3f}× on average<extra>%{fullData.name}</extra>",
    };
  }));
  return [traces, layout(colors, {
    barmode: "group", xaxis: { type: "category", title: "layer" },
    yaxis: { title: "mean busiest / mean rank" },
  })];
}
