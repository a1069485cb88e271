// Builds the page, and follows the runs if they are served.

let page = JSON.parse(document.getElementById("data").textContent);
const hidden = new Set();

/** The colour of a run: that of its group or, if there is one group, its own. */
function colourOf(run) {
  return COLOURS[(page.groups.length > 1 ? page.runs[run].group : run) % COLOURS.length];
}

function legend() {
  const button = (run, at) => el("button", {
    "aria-pressed": String(!hidden.has(at)), title: "hide or show", onclick: () => {
      hidden.has(at) ? hidden.delete(at) : hidden.add(at);
      legend();
      applyHidden();
    } }, swatch(at), run.name);
  document.getElementById("legend").replaceChildren(...(page.runs.length > 1 ? page.runs.map(button) : []));
}

/** Leaves hidden runs out of everything that is drawn by run. */
function applyHidden() {
  for (const box of document.querySelectorAll("[data-runs]")) {
    box.hidden = box.dataset.runs.split(" ").every((run) => hidden.has(Number(run)));
  }
  redraw();
}

function build() {
  const parts = [differences, overview, results, losses, positions, duringTraining, heatmaps, byLayer, attentionMaps, samples];
  charts.clear();
  document.getElementById("report").replaceChildren(...parts.map((part) => part()).filter(Boolean));
  document.getElementById("footer").textContent = `Longwall ${page.longwall_version}. Charts by uPlot (MIT).`;
  document.getElementById("status").textContent = page.version ? "follows the runs as they train" : "";
  legend();
  applyHidden();
}

/** Asks for new data every few seconds. What is folded out or chosen stays as long as nothing has changed. */
async function follow() {
  try {
    const answer = await fetch(`data.json?since=${page.version}`);
    if (answer.status === 200) {
      page = await answer.json();
      const top = window.scrollY;
      build();
      window.scrollTo(0, top);
    } else if (answer.status !== 204) {
      throw new Error(await answer.text());
    }
    document.getElementById("status").textContent = "follows the runs as they train";
  } catch (error) {
    document.getElementById("status").textContent = `no new data: ${error.message}`;
  }
  setTimeout(follow, 5000);
}

build();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
// Canvases do not follow styles: on paper they are drawn with its colours and width.
matchMedia("print").addEventListener("change", redraw);
if (page.version) setTimeout(follow, 5000);
