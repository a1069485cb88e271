// The sections of a report, in their order. Each returns an element, or null if there is nothing to show.

function section(title, about, ...children) {
  return el("section", {}, el("h2", {}, title), about ? el("p", { class: "soft" }, about) : null, ...children);
}

function panel(title, ...children) {
  return el("div", { class: "panel" }, el("h3", {}, title), ...children);
}

/** The colour mark of a run. */
function swatch(run) {
  return el("span", { class: "swatch", style: { background: colourOf(run) } });
}

const groupName = (group) => page.groups[group].name;

function overview() {
  const head = el("tr", {}, ["run", "seed", "steps", "state", "parameters", "device"].map((text) => el("th", {}, text)));
  const row = (run, at) => {
    const skipped = run.skipped ? `, ${run.skipped} skipped` : "";
    const state = run.finished ? "finished" : run.step ? "not finished" : "no step yet";
    return el("tr", {},
      el("th", {}, el("span", { class: "named" }, swatch(at), run.name)),
      el("td", {}, String(run.seed)),
      el("td", { class: "number" }, `${run.step} of ${run.total_steps}${skipped}`),
      el("td", {}, state),
      el("td", {}, run.parameters ? short(run.parameters) : "–"),
      el("td", {}, run.device ?? "–"));
  };
  const configs = page.runs.map((run) => el("details", {}, el("summary", {}, run.name), el("pre", {}, run.config)));
  return section("Runs", null,
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, page.runs.map(row)))),
    el("details", {}, el("summary", {}, "Configurations"), configs));
}

function differences() {
  if (page.groups.length < 2) return null;
  const head = el("tr", {}, el("th", {}, "key"), page.groups.map((group) => el("th", {}, group.name)));
  const rows = page.differences.map(({ key, values }) =>
    el("tr", {}, el("th", { class: "mono" }, key), values.map((value) => el("td", { class: "mono" }, value))));
  return section("What differs", "Keys of the configuration that affect results, apart from the seed.",
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows))));
}

// Horizontal axes of the losses: label, and how to show a value.
const AXES = { tokens: ["training tokens", short], flops: ["training FLOPs", short], seconds: ["time of training", duration] };

// Steps between the marks of an axis of seconds.
const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 432000, 864000];

/** Exponential moving average with bias correction. */
function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value == null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

function losses() {
  const view = { smooth: 0.6, log: false, training: true };
  const lines = (axis) => () => page.runs.flatMap((run, at) => {
    const pairs = (curve, values) => curve[axis].map((x, n) => [x, values[n]]).filter(([x]) => x != null && x > 0);
    const training = { run: at, label: `${run.name}, training`, thin: true, points: pairs(run.training, smoothed(run.training.loss, view.smooth)) };
    const validation = { run: at, label: `${run.name}, validation`, dots: true, points: pairs(run.validation, run.validation.loss) };
    return view.training ? [training, validation] : [validation];
  });
  const parts = Object.entries(AXES).map(([axis, [label, showX]]) => {
    const box = panel("Loss over " + label);
    const incrs = axis === "seconds" ? TIMES : undefined;
    chart(box, { x: label, y: "loss (nats per token)", showX, incrs, logX: () => view.log, lines: lines(axis) });
    return box;
  });
  const set = (key) => (value) => { view[key] = value; redraw(); };
  const slider = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: view.smooth, oninput: () => set("smooth")(Number(slider.value)) });
  return section("Loss", "Thin lines: training; lines with dots: validation. Drag to zoom, double-click to zoom out. Long runs are averaged over groups of steps.",
    el("div", { class: "controls" }, tick("training", true, set("training")), tick("logarithmic", false, set("log")), el("label", {}, "smoothing", slider)),
    el("div", { class: "panels" }, parts));
}

function positions() {
  const parts = [];
  if (page.runs.some((run) => run.positions)) {
    const box = panel("In-context learning at the last validation");
    const lines = () => page.runs.filter((run) => run.positions).map((run) => ({
      run: page.runs.indexOf(run), label: `${run.name}, step ${run.positions.step}`, dots: true, points: run.positions.points }));
    chart(box, { x: "tokens read", y: "loss (nats per token)", logX: () => true, lines });
    parts.push(box);
  }
  if (page.runs.some((run) => run.best_context.loss.some((loss) => loss != null))) {
    const box = panel("Best-context loss");
    const lines = () => page.runs.map((run, at) => ({
      run: at, label: run.name, dots: true, points: run.best_context.tokens.map((x, n) => [x, run.best_context.loss[n]]) }));
    chart(box, { x: "training tokens", y: "loss (nats per token)", lines });
    parts.push(box);
  }
  for (const name of evaluationNames((evaluation) => evaluation.positions)) {
    const found = finals(name).filter((evaluation) => evaluation.positions);
    const longest = Math.max(...found.flatMap((evaluation) => evaluation.positions.map((bin) => bin.length)));
    const box = panel(`${name}: loss by position, length ${longest}`);
    const bins = (evaluation) => evaluation.positions.filter((bin) => bin.length === longest && bin.binning === "logarithmic" && bin.value != null);
    const lines = () => found.map((evaluation) => ({
      run: evaluation.run, label: page.runs[evaluation.run].name, dots: true, points: bins(evaluation).map((bin) => [bin.to, bin.value]),
      band: found.length > 3 ? undefined : bins(evaluation).filter((bin) => bin.low != null).map((bin) => [bin.to, bin.low, bin.high]) }));
    chart(box, { x: "tokens read", y: "loss (nats per token)", logX: () => true, lines });
    parts.push(box);
  }
  return parts.length ? section("Loss by position", "A falling curve shows what the model gains from context. Bands: 95 % intervals.", el("div", { class: "panels" }, parts)) : null;
}

/** Names of evaluations whose final results satisfy a condition. */
function evaluationNames(condition) {
  return [...new Set(page.evaluations.filter((evaluation) => evaluation.is_final && condition(evaluation)).map((evaluation) => evaluation.name))];
}

const finals = (name) => page.evaluations.filter((evaluation) => evaluation.is_final && evaluation.name === name);

function duringTraining() {
  const loops = page.evaluations.filter((evaluation) => evaluation.in_loop);
  const names = [...new Set(loops.flatMap((evaluation) => Object.keys(evaluation.headline).map((score) => evaluation.name + "\n" + score)))];
  const parts = names.slice(0, 12).map((key) => {
    const [name, score] = key.split("\n");
    const box = panel(`${name}: ${score}`);
    const tokens = (run, step) => step * (run.training.tokens[0] / run.training.step[0]);
    const lines = () => page.runs.map((run, at) => {
      const own = loops.filter((evaluation) => evaluation.run === at && evaluation.name === name && evaluation.headline[score]?.value != null);
      const x = (evaluation) => tokens(run, evaluation.step);
      const estimates = own.map((evaluation) => [x(evaluation), evaluation.headline[score]]);
      return { run: at, label: run.name, dots: true, points: estimates.map(([x, estimate]) => [x, estimate.value]),
        band: page.runs.length > 3 ? undefined : estimates.filter(([, e]) => e.low != null).map(([x, e]) => [x, e.low, e.high]) };
    });
    chart(box, { x: "training tokens", y: score, range: /accuracy|error_/.test(score) ? [0, 1] : undefined, lines });
    return box;
  });
  const more = names.length > parts.length ? `The first 12 of ${names.length} scores. ` : "";
  return parts.length ? section("Evaluations during training", more + "Bands: 95 % intervals over the samples.", el("div", { class: "panels" }, parts)) : null;
}

function results() {
  if (page.table.length === 0) return null;
  const head = el("tr", {}, el("th", {}, ""), page.groups.map((group) => el("th", {}, group.name)));
  const cell = (found) => {
    if (found.mean == null) return el("td", { class: "number soft" }, "–");
    const { estimate, difference } = found;
    const error = found.error ?? estimate?.standard_error;
    let text = error != null ? showError(found.mean, error) : show(found.mean);
    if (error == null && estimate?.low != null) text += ` [${show(estimate.low)}, ${show(estimate.high)}]`;
    const details = [];
    if (found.n > 1) details.push(`n = ${found.n} seeds`);
    if (difference) {
      const sign = difference.mean >= 0 ? "+" : "−";
      const p = difference.adjusted == null ? "no p-value" : showP(difference.adjusted);
      details.push(`${sign}${show(Math.abs(difference.mean))}, n = ${difference.n} ${difference.of}, ${p} (${difference.test})`);
    }
    return el("td", { class: difference?.marked ? "number marked" : "number" }, text, details.map((detail) => el("span", { class: "detail" }, detail)));
  };
  const rows = page.table.map((row) => el("tr", {}, el("th", {}, row.metric), row.cells.map(cell)));
  const compared = page.groups.length > 1
    ? ` Below a value: its difference from ${groupName(0)} in paired samples or seeds, and the p-value, adjusted for the number of comparisons in the table (Holm). Coloured: p < 0.05. Evaluations with different settings, and models of different steps, are not compared.`
    : "";
  return section("Results", "± is the standard error over the seeds or, with one seed, over the evaluation's samples; brackets hold the 95 % interval of one seed's proportion." + compared,
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows))));
}

function heatmaps() {
  const names = evaluationNames((evaluation) => evaluation.scores.some((score) => score.depth != null));
  const parts = names.map((name) => el("div", {}, el("h3", {}, name),
    el("div", { class: "panels" }, page.groups.map((group, at) => heatmap(name, group, at)))));
  return parts.length ? section("Length and depth", "Accuracy by length (tokens) and depth of the needle (%), mean over a group's runs. Lengths beyond the training length are in italics.", parts) : null;
}

function heatmap(name, group, at) {
  const found = finals(name).filter((evaluation) => group.runs.includes(evaluation.run));
  if (found.length === 0) return null;
  const scores = found.flatMap((evaluation) => evaluation.scores.filter((score) => score.depth != null && score.length != null));
  const distinct = (values) => [...new Set(values)].sort((a, b) => a - b);
  const lengths = distinct(scores.map((score) => score.length));
  const depths = distinct(scores.map((score) => score.depth));
  const cell = (depth, length) => {
    const here = scores.filter((score) => score.depth === depth && score.length === length && score.value != null);
    if (here.length === 0) return el("td", { class: "none", title: "no sample" });
    const mean = here.reduce((sum, score) => sum + score.value, 0) / here.length;
    const samples = here.reduce((sum, score) => sum + score.samples, 0);
    const title = `length ${length}, depth ${(depth * 100).toFixed(0)} %: ${show(mean)} of ${samples} samples`;
    return el("td", { style: heat(mean), title }, lengths.length > 14 ? "" : String(Math.round(mean * 100)));
  };
  const head = el("tr", {}, el("th", { class: "corner" }, "depth"), lengths.map((length) => el("th", { class: length > found[0].train_seq_len ? "beyond" : "" }, lengths.length > 10 ? short(length) : String(length))));
  const rows = depths.map((depth) => el("tr", {}, el("th", {}, (depth * 100).toFixed(0) + " %"), lengths.map((length) => cell(depth, length))));
  const box = panel(page.groups.length > 1 || group.runs.length > 1 ? groupName(at) : "", el("table", { class: "heat" }, el("thead", {}, head), el("tbody", {}, rows)));
  box.dataset.runs = group.runs.join(" ");
  return box;
}

function byLayer() {
  const names = evaluationNames((evaluation) => evaluation.layers);
  const parts = names.flatMap((name) => {
    const found = finals(name).filter((evaluation) => evaluation.layers);
    const metrics = [...new Set(found.flatMap((evaluation) => evaluation.layers.map((layer) => layer.metric)))];
    return metrics.map((metric) => layersPanel(name, metric, found));
  });
  return parts.length ? section("Attention by layer", "What attention layers measure of themselves. Bands: from the lowest head to the highest.", el("div", { class: "panels" }, parts)) : null;
}

function layersPanel(name, metric, found) {
  const layers = (evaluation) => evaluation.layers.filter((layer) => layer.metric === metric && layer.value != null);
  const lengths = [...new Set(found.flatMap((evaluation) => layers(evaluation).map((layer) => layer.length)))].sort((a, b) => a - b);
  const trained = lengths.filter((length) => length <= found[0].train_seq_len);
  let chosen = String(trained.length ? trained[trained.length - 1] : lengths[0]);
  const at = (evaluation) => layers(evaluation).filter((layer) => String(layer.length) === chosen);
  const ends = (layer) => {
    const heads = layer.heads.flat().filter((value) => value != null);
    return heads.length ? [layer.layer, Math.min(...heads), Math.max(...heads)] : null;
  };
  const lines = () => found.map((evaluation) => ({
    run: evaluation.run, label: page.runs[evaluation.run].name, dots: true, points: at(evaluation).map((layer) => [layer.layer, layer.value]),
    band: found.length > 3 ? undefined : at(evaluation).map(ends).filter(Boolean) }));
  const box = panel(`${name}: ${metric}`, el("div", { class: "controls" },
    choice("length", lengths.map((length) => [String(length), String(length)]), chosen, (value) => { chosen = value; draw(item); })));
  const item = chart(box, { x: "layer", y: metric, showX: (x) => (Number.isInteger(x) ? String(x) : ""), lines });
  return box;
}

function attentionMaps() {
  const found = page.evaluations.filter((evaluation) => evaluation.is_final && evaluation.maps?.layers.length);
  const about = "Weight of each key (across) in each query (down), by head; bright is large. In layers with weights of both signs, red is above 0 and blue below; where a layer subtracts two views, a query's weights are shown over the sum of their sizes. Colours end at the head's largest weight.";
  return found.length ? section("Attention weights", about, found.map(textMaps)) : null;
}

/** The maps of one text, a layer at a time. */
function textMaps({ run, name, maps }) {
  const body = el("div", { class: "panels maps" });
  const tip = el("p", { class: "soft mono", "aria-live": "polite" }, "Point at a map to read a weight.");
  const set = (at) => {
    const layer = maps.layers[at];
    const signed = layer.heads.some((head) => head.weights.some((weight) => weight < 0));
    body.replaceChildren(...layer.heads.map((head, at) => attentionMap(maps.tokens, head, at, signed, tip)));
  };
  const options = maps.layers.map((layer, at) => [String(at), `${layer.layer} (${layer.kind}${layer.shares ? ", shares" : ""})`]);
  set(0);
  const note = maps.left_out ? el("p", { class: "soft" }, `${maps.left_out} more layers are in the evaluation's weights.json.`) : null;
  return el("div", { "data-runs": String(run) }, el("h3", {}, el("span", { class: "named" }, swatch(run), `${page.runs[run].name}: ${name}`)),
    el("pre", {}, maps.tokens.join("")), el("div", { class: "controls" }, choice("layer", options, "0", (value) => set(Number(value)))), note, tip, body);
}

function attentionMap(tokens, head, number, signed, tip) {
  const size = tokens.length;
  const canvas = el("canvas", { class: "map", width: size, height: size, role: "img", "aria-label": `weights of head ${number}` });
  const first = (query) => query * (query + 1) / 2;
  const context = canvas.getContext("2d");
  for (let query = 0; query < size; query++) {
    for (let key = 0; key <= query; key++) {
      const weight = head.weights[first(query) + key];
      if (weight == null) continue;
      context.fillStyle = signed ? diverging(weight / 127) : heat(weight / 127).background;
      context.fillRect(key, query, 1, 1);
    }
  }
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const place = (at, length) => Math.min(size - 1, Math.max(0, Math.floor(at / length * size)));
    const [key, query] = [place(event.clientX - box.left, box.width), place(event.clientY - box.top, box.height)];
    const weight = key > query ? null : head.weights[first(query) + key];
    const text = (at) => `${at} ${JSON.stringify(tokens[at])}`;
    tip.textContent = `head ${number}, query ${text(query)}, key ${text(key)}: ${weight == null ? "–" : show(weight / 127 * head.largest)}`;
  });
  return panel(`head ${number} (largest ${show(head.largest)})`, canvas);
}

function samples() {
  const names = Object.keys(page.samples);
  const parts = [];
  if (names.length) {
    const view = { name: names[0], at: 0, only: "all" };
    const body = el("div");
    const chosen = () => page.samples[view.name].filter(({ answers }) => {
      const scores = answers.map((answer) => answer.score).filter((score) => score != null);
      return view.only === "all" || (view.only === "wrong" ? scores.some((score) => score < 1) : new Set(scores).size > 1);
    });
    const update = () => body.replaceChildren(...sampleView(view, chosen(), (at) => { view.at = at; update(); }));
    const set = (key) => (value) => { view[key] = value; view.at = 0; update(); };
    parts.push(el("div", { class: "panel" }, el("div", { class: "controls" },
      choice("evaluation", names.map((name) => [name, name]), view.name, set("name")),
      choice("show", [["all", "all"], ["wrong", "with a wrong answer"], ["different", "answered differently"]], "all", set("only"))), body));
    update();
  }
  const generated = page.runs.filter((run) => run.samples.length);
  const texts = generated.map((run) => el("details", {}, el("summary", {}, `${run.name}: generated during training`),
    run.samples.map((sample) => [el("p", { class: "soft" }, sample.title), el("pre", {}, sample.text)])));
  parts.push(...texts);
  return parts.length ? section("Samples", null, parts) : null;
}

function sampleView(view, list, go) {
  if (list.length === 0) return [el("p", { class: "soft" }, "No such sample among those on this page.")];
  const at = Math.min(view.at, list.length - 1);
  const sample = list[at];
  const step = (by) => () => go((at + by + list.length) % list.length);
  const depth = sample.depth == null ? "" : `, depth ${(sample.depth * 100).toFixed(0)} %`;
  const prompt = el("pre", {}, sample.prompt);
  const answers = sample.answers.filter((answer) => !hidden.has(answer.run)).map((answer) => el("div", { class: "answer" },
    el("span", { class: "name" }, swatch(answer.run), page.runs[answer.run].name),
    el("span", { class: "mono" }, answer.output ?? "–"),
    el("span", { class: "verdict" }, answer.score == null ? "" : answer.score === 1 ? "✓" : answer.score === 0 ? "✗" : show(answer.score))));
  return [
    el("div", { class: "controls" }, el("button", { onclick: step(-1), "aria-label": "previous sample" }, "◀"), `${at + 1} of ${list.length}`,
      el("button", { onclick: step(1), "aria-label": "next sample" }, "▶"),
      el("span", { class: "soft" }, `sample ${sample.id}, length ${sample.length}${depth}`)),
    prompt, sample.expected ? el("p", {}, "expected: ", el("code", {}, sample.expected)) : null, ...answers].filter(Boolean);
}
