// Line charts with uPlot: hover, zoom by dragging, a double click to zoom out.

const charts = new Set();

/**
 * A chart in `parent`. `options.lines()` returns the lines: { run, label, points: [[x, y]…], thin, dots, dashed,
 * band }, where `band` holds [x, low, high] triples. Lines of hidden runs are left out.
 */
function chart(parent, options) {
  const holder = el("div", { class: "chart" });
  const item = { holder, options, plot: null, width: 0 };
  // Drawing does not change the size of what is observed: it has the chart's width, and no height.
  const ruler = el("div");
  parent.append(ruler, holder);
  charts.add(item);
  new ResizeObserver(() => ruler.clientWidth && ruler.clientWidth !== item.width && draw(item)).observe(ruler);
  return item;
}

/** Draws every chart again: runs were hidden, colours have changed. */
function redraw() {
  for (const item of charts) item.holder.isConnected ? draw(item) : charts.delete(item);
}

function draw(item) {
  const { holder, options } = item;
  item.width = holder.clientWidth;
  if (!item.width) return;
  item.plot?.destroy();
  holder.replaceChildren();
  const lines = options.lines().filter((line) => !hidden.has(line.run) && line.points.some(([, y]) => y != null));
  if (lines.length === 0) {
    holder.append(el("p", { class: "soft" }, "Nothing to show."));
    return;
  }
  const tables = lines.map(columns);
  const data = uPlot.join(tables);
  const tip = el("div", { class: "tip", hidden: true });
  const series = lines.flatMap(seriesOf);
  item.plot = new uPlot(settings(item, lines, series, tip), data, holder);
  item.plot.over.append(tip);
}

/** A line's points as columns: x, y and, for a band, its ends. Logarithmic axes show what is above 0. */
function columns(line) {
  const points = [...line.points].sort((a, b) => a[0] - b[0]);
  const table = [points.map(([x]) => x), points.map(([, y]) => y)];
  if (line.band) {
    const ends = new Map(line.band.map(([x, low, high]) => [x, [low, high]]));
    table.push(table[0].map((x) => ends.get(x)?.[1] ?? null), table[0].map((x) => ends.get(x)?.[0] ?? null));
  }
  return table;
}

function seriesOf(line) {
  const colour = colourOf(line.run);
  const main = {
    label: line.label,
    stroke: line.thin ? colour + "99" : colour,
    width: line.thin ? 1 : 2,
    dash: line.dashed ? [5, 4] : undefined,
    spanGaps: true,
    points: { show: Boolean(line.dots), size: 6, fill: colour },
  };
  const end = { label: "", stroke: colour + "55", width: 1, spanGaps: true, points: { show: false } };
  return line.band ? [main, end, end] : [main];
}

function settings(item, lines, series, tip) {
  const { options } = item;
  const grid = { stroke: style("--line"), width: 1 };
  const axis = { stroke: style("--soft"), grid, ticks: grid, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif", labelSize: 20 };
  const showX = options.showX ?? tidy;
  const logX = options.logX?.() ?? false;
  const first = (values) => values.map((value) => (value == null ? null : showX(value)));
  let at = 1;
  const bands = [];
  for (const line of lines) {
    if (line.band) bands.push({ series: [at + 1, at + 2], fill: colourOf(line.run) + "22" });
    at += line.band ? 3 : 1;
  }
  return {
    width: item.width,
    height: Math.max(240, Math.min(360, item.width * 0.62)),
    series: [{ label: options.x }, ...series],
    bands,
    legend: { show: false },
    scales: {
      x: { time: false, distr: logX ? 3 : 1, range: logX ? (_, least, most) => [least, most] : undefined },
      y: { range: options.range ? () => options.range : undefined },
    },
    axes: [
      { ...axis, label: options.x, values: (_, values) => first(values), space: 60, size: 34, ...(options.incrs && !logX ? { incrs: options.incrs } : {}) },
      { ...axis, label: options.y, values: (_, values) => values.map((value) => (value == null ? null : tidy(value))), size: 56 },
    ],
    cursor: { drag: { x: true, y: false }, focus: { prox: 1e6 }, dataIdx: nearest, points: { size: 7 } },
    focus: { alpha: 0.35 },
    hooks: {
      setSeries: [(plot, index) => { plot.focused = index; }],
      setCursor: [(plot) => showTip(plot, tip, showX)],
    },
  };
}

/** The point of a series that is nearest to the cursor: lines do not share their places. */
function nearest(plot, series, index) {
  const values = plot.data[series];
  for (let step = 0; step < values.length; step++) {
    if (values[index - step] != null) return index - step;
    if (values[index + step] != null) return index + step;
  }
  return index;
}

function showTip(plot, tip, showX) {
  const { left, top, idxs } = plot.cursor;
  const found = plot.focused;
  const index = found == null ? null : idxs?.[found];
  if (left < 0 || index == null || !plot.series[found]?.label) {
    tip.hidden = true;
    return;
  }
  tip.textContent = `${plot.series[found].label}\n${plot.series[0].label} ${showX(plot.data[0][index])}: ${show(plot.data[found][index])}`;
  tip.hidden = false;
  const right = left > plot.over.clientWidth / 2;
  tip.style.left = right ? "auto" : left + 12 + "px";
  tip.style.right = right ? plot.over.clientWidth - left + 12 + "px" : "auto";
  tip.style.top = Math.max(0, top - 30) + "px";
}
