// The report of a run: what is chosen, and everything that follows it.

const run = JSON.parse(byId("run").textContent);
const { axis, cells } = run;
const diversities = [...new Set(cells.map((cell) => cell.chains))];
const seeds = [...new Set(cells.map((cell) => cell.seed))];
const chooseChains = byId("choose-chains"), chooseSeed = byId("choose-seed");
const chooseStep = byId("choose-step"), play = byId("play");
const title = (cell) => `K = ${cell.chains}` + (seeds.length > 1 ? `, seed ${cell.seed}` : "");
const plain = (cell) => cell.chains.replaceAll(",", "").replace("∞", "infinite");

let chosen = richest(cells);
let cursor = null; // place of the step that is looked at

const mark = phaseMap(byId("map"), run, (cell, step) => (cell === chosen ? look(step) : choose(cell, step)));
const curves = trainingCurves(run);
const inside = insideModels(run, JSON.parse(byId("model").textContent), plain, address);

/** Look at a cell, and at one step of it where `step` is not null. */
function choose(index, step = cursor) {
  chosen = index;
  const cell = cells[index];
  chooseChains.value = cell.chains;
  chooseSeed.value = String(cell.seed);
  chooseStep.max = Math.max(0, cell.steps - 1);
  chooseStep.disabled = play.disabled = !cell.steps;
  cursor = within(step);
  byId("story").replaceChildren(html("b", {}, title(cell)), `: ${story(cell)}`);
  byId("curves").hidden = !cell.steps;
  curves.draw(cell, cursor);
  show();
}

/** Look at a step, by its place, of the chosen cell; with null at none. */
function look(step) {
  cursor = within(step);
  curves.look(cells[chosen], cursor);
  show();
}

/** The place nearest to a step that the chosen cell has. */
function within(step) {
  const last = cells[chosen].steps - 1;
  return step === null || last < 0 ? null : Math.max(0, Math.min(step, last));
}

/** Everything but the charts follows what is looked at. */
function show() {
  const cell = cells[chosen], last = cell.steps - 1, at = cursor ?? last;
  chooseStep.value = at;
  byId("shown-step").textContent = last < 0 ? "" : count(axis.steps[at]);
  chooseStep.setAttribute("aria-valuetext", last < 0 ? "" : `step ${count(axis.steps[at])}, ${cell.phase[at]}`);
  byId("now").replaceChildren(...(last < 0 ? [] : details(run, cell, at)));
  mark(chosen, cursor);
  inside.show(chosen, at);
  address();
}

/** The address says what is looked at. */
function address() {
  const { seed } = cells[chosen], states = inside.written();
  const seen = (cursor === null ? "" : `&step=${axis.steps[cursor]}`) + (states === null ? "" : `&states=${states}`);
  // Browsers refuse it where it is done too often.
  try { history.replaceState(null, "", `#K=${plain(cells[chosen])}&seed=${seed}${seen}`); } catch { /* the next step may do */ }
}

/** The cell and the step that the address names, if it does. */
function follow() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const index = cells.findIndex((cell) => plain(cell) === asked.get("K") && String(cell.seed) === (asked.get("seed") ?? String(seeds[0])));
  if (asked.has("states")) {
    byId("states").value = asked.get("states");
    inside.read(asked.get("states"));
  }
  if (index < 0) return choose(chosen);
  const far = axis.steps.map((step) => Math.abs(step - asked.get("step")));
  choose(index, /^\d+$/.test(asked.get("step")) ? far.indexOf(Math.min(...far)) : null);
}

// Played, a step stands for a sixth of a second.
let playing = null;
function stop() {
  clearInterval(playing);
  playing = null;
  play.textContent = "Play";
}
play.addEventListener("click", () => {
  if (playing !== null) return stop();
  const last = cells[chosen].steps - 1;
  look(cursor === null || cursor === last ? 0 : cursor);
  play.textContent = "Pause";
  playing = setInterval(() => {
    if (cursor === null || cursor >= cells[chosen].steps - 1) return stop();
    look(cursor + 1);
  }, 160);
});
chooseStep.addEventListener("input", () => { stop(); look(+chooseStep.value); });
chooseChains.append(...diversities.map((chains) => html("option", {}, chains)));
chooseSeed.append(...seeds.map((seed) => html("option", {}, seed)));
byId("seed-label").hidden = seeds.length < 2;
for (const select of [chooseChains, chooseSeed])
  select.addEventListener("change", () => {
    hideTip();
    const isChains = (cell) => cell.chains === chooseChains.value, isSeed = (cell) => String(cell.seed) === chooseSeed.value;
    const both = cells.findIndex((cell) => isChains(cell) && isSeed(cell));
    // A refined sweep has other K for each seed.
    choose(both >= 0 ? both : cells.findIndex(select === chooseChains ? isChains : isSeed));
  });
for (const form of document.querySelectorAll("form")) form.addEventListener("submit", (event) => event.preventDefault());

follow();
performance.mark("map");
window.addEventListener("hashchange", follow);
// Charts and patterns are drawn in colours of their own; paper is light.
for (const medium of ["(prefers-color-scheme: dark)", "print"])
  matchMedia(medium).addEventListener("change", () => choose(chosen));
// What is heavy comes last in the file, compressed, so that the map need not wait for it.
document.addEventListener("DOMContentLoaded", async () => {
  inside.show(chosen, cursor ?? cells[chosen].steps - 1);
  const drawing = html("script");
  drawing.textContent = new TextDecoder().decode(await unpack("plotly"));
  document.head.append(drawing);
  curves.draw(cells[chosen], cursor);
});
