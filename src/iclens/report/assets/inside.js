/**
 * The inside of the models: what one predicts from a sequence, where it looks, its task vectors, its circuit.
 *
 * The models run here, from the parameters in the page, so that the sequence can be edited; they are
 * unpacked when their cell is looked at.  Returns `show(cell, step)`, and `read(text)` and `written()`,
 * which take and give the sequence that is not the one the page chose.  `changed()` is called when it
 * is another one.
 */
function insideModels({ axis, cells, phases }, model, plain, changed) {
  const { states: size, context, config } = model;
  const choose = byId("choose-sequence"), edit = byId("states"), fault = byId("states-fault");
  const letters = size <= 10; // a state is one digit
  const write = (states) => Array.from(states).join(letters ? "" : " ");
  const blocks = new Map();
  let at = { cell: 0, step: 0 }, block = null, sequence = null, own = false; // whether the reader chose the sequence

  /** The arrays of a cell, unpacked once; null while the page is still being read. */
  async function blockOf(cell) {
    if (document.readyState === "loading") return null;
    if (!blocks.has(cell)) blocks.set(cell, unpack(`cell-${cell}`).then(readBlock));
    return blocks.get(cell);
  }

  function readBlock(bytes) {
    const { arrays, metadata } = readArrays(bytes);
    const listed = (name) => (metadata[name] ? JSON.parse(metadata[name]) : []);
    /** An array at a place of its first axis, flat. */
    const row = (name, place) => {
      const { shape, data } = arrays[name], length = data.length / shape[0];
      return data.subarray(place * length, (place + 1) * length);
    };
    const rows = (name) => Array.from({ length: arrays[name]?.shape[0] ?? 0 }, (_, place) => Array.from(row(name, place)));
    /** The parameters of the checkpoint at a place in `steps`. */
    const weights = (place) => Object.fromEntries(Object.entries(arrays)
      .filter(([name]) => name.startsWith("weights."))
      .map(([name, { shape }]) => [name.slice(8), { shape: shape.slice(1), data: row(name, place) }]));
    const chains = arrays.transition && { count: arrays.transition.shape[0], transition: arrays.transition.data, stationary: arrays.stationary.data, prior: arrays.prior.data };
    return {
      arrays, row, rows, weights, steps: Array.from(arrays.steps?.data ?? []),
      edges: listed("edges"), criteria: listed("criteria"), phases: listed("phases"),
      tables: { C: size, onePoint: model.onePoint, pseudoCounts: model.pseudoCounts, successors: model.successors, chains: chains ?? null },
    };
  }

  const nearest = (steps, step) => {
    const far = Array.from(steps, (other) => Math.abs(Math.log(other + 1) - Math.log(step + 1)));
    return far.indexOf(Math.min(...far));
  };

  async function show(cell, step) {
    const other = at.cell !== cell;
    at = { cell, step };
    if (other) block = null; // nothing is drawn of the one before under the new one's name
    let found;
    try {
      found = await blockOf(cell);
    } catch (error) {
      blocks.delete(cell);
      byId("inside").hidden = byId("traced").hidden = true;
      byId("inside-note").textContent = `This browser cannot unpack the models in the page: ${error.message}`;
      return;
    }
    if (found === null || at.cell !== cell || at.step !== step) return;
    if (block !== found) {
      block = found;
      offerSequences();
    }
    drawModel();
    drawTrace();
  }

  // ---- the sequence ----
  function offerSequences() {
    const fresh = cells[at.cell].chains === "∞", index = block.arrays.sequence_chain?.data ?? [];
    const options = block.rows("sequences").map((states, place) =>
      [`${fresh ? "fresh chain" : "chain"} ${index[place] + 1}, ${index.indexOf(index[place]) === place ? "a" : "another"} sequence`, states]);
    if (!fresh) block.rows("fresh").forEach((states, place) => options.push([`fresh chain ${place + 1} (OOD)`, states]));
    choose.replaceChildren(...options.map(([name, states]) => html("option", { value: write(states) }, name)), html("option", { value: "", hidden: true }, "your states"));
    if (!own && options.length) take(options[0][1]);
    else if (sequence !== null) take(sequence);
  }

  function take(states) {
    sequence = states;
    const text = write(states);
    if (edit.value !== text) edit.value = text;
    choose.value = [...choose.options].some(({ value }) => value === text) ? text : "";
    complain("");
  }

  function complain(message) {
    fault.textContent = message;
    edit.setAttribute("aria-invalid", message !== "");
  }

  /** Take the states in a text; what is wrong with them is said, and the last right ones stay. */
  function read(text) {
    const parts = letters ? [...text.replaceAll(/[\s,]/g, "")] : text.split(/[\s,]+/).filter(Boolean);
    const wrong = parts.findIndex((part) => !/^\d+$/.test(part) || +part >= size);
    if (wrong >= 0) return complain(`State ${wrong + 1}: expected a whole number from 0 to ${size - 1}, got ${parts[wrong]}`);
    if (!parts.length) return complain("Expected at least one state");
    if (parts.length > context) return complain(`Expected at most ${context} states, the model's context; got ${parts.length}`);
    own = true;
    sequence = parts.map(Number);
    choose.value = [...choose.options].some(({ value }) => value === write(sequence)) ? write(sequence) : "";
    complain("");
    drawModel();
    changed();
  }

  choose.addEventListener("change", () => { edit.value = choose.value; read(edit.value); });
  edit.addEventListener("input", () => read(edit.value));

  // ---- what the model does with it ----
  function drawModel() {
    if (block === null) return;
    const has = block.steps.length > 0 && sequence !== null, asked = axis.steps[at.step];
    byId("inside").hidden = !has;
    if (!has) {
      byId("inside-note").textContent = cells[at.cell].steps
        ? "This page has no parameters of this model: none could be saved, half precision cannot hold them, or the run has more than fit into a page."
        : "Nothing is saved of this model.";
      return;
    }
    const place = nearest(block.steps, asked), step = block.steps[place];
    byId("inside-note").textContent = `Model at step ${count(step)}${step === asked ? "" : `, which is the nearest to step ${count(asked)} that this page holds (${block.steps.length} of ${cells[at.cell].steps})`}.`;
    const run = forwardPass(block.weights(place), config, sequence);
    drawPredictions(run);
    drawAttention(run);
    byId("plane").replaceChildren(taskPlane(block, place, run.phi));
  }

  function drawPredictions({ probabilities }) {
    const rows = { model: probabilities.at(-1), ...referencePredictions(sequence, block.tables) };
    const border = Object.fromEntries(Object.values(phases).map((phase) => [phase.reference, phase.colour]));
    const divergence = (from) => from.reduce((sum, p, state) => sum + (p > 0 ? p * Math.log(p / rows.model[state]) : 0), 0);
    const head = html("tr", {}, html("td", {}), ...rows.model.map((_, state) => html("th", { scope: "col", class: "number" }, model.labels ? `${state} ${model.labels[state]}` : state)),
      html("th", { scope: "col", class: "number" }, "KL, nats"));
    const body = Object.entries(rows).map(([name, row]) => html("tr", { class: name === "model" ? "own" : "" },
      html("th", { scope: "row" }, html("i", { class: "line", style: `border-color: ${border[name] ?? "var(--ink)"}` }), name),
      ...(row ?? rows.model).map((probability) => html("td", { class: "number" },
        ...(row ? [html("i", { class: "bar", style: `height: ${(1.9 * probability).toFixed(3)}rem; background: ${border[name] ?? "var(--ink)"}` }), probability.toFixed(3).replace("0.", ".")] : ["–"]))),
      html("td", { class: "number" }, name === "model" || !row ? "" : nats(divergence(row)))));
    byId("predictions").replaceChildren(html("thead", {}, head), html("tbody", {}, ...body));
    byId("predictions-note").textContent = block.tables.chains ? ""
      : cells[at.cell].chains === "∞" ? "Where every chain is fresh, there is none to memorise: two references."
        : "The set of chains is too large for this page: the memorising references are left out.";
  }

  function drawAttention({ attention }) {
    byId("attention").replaceChildren(...attention.flatMap((heads, layer) =>
      heads.map((pattern, head) => attentionPattern(`att${layer + 1}.${head}`, pattern, sequence))));
  }

  // ---- what was traced ----
  function drawTrace() {
    const cell = cells[at.cell], steps = block.arrays["trace.step"]?.data;
    byId("traced").hidden = !steps;
    byId("untraced").hidden = Boolean(steps) || !cell.steps;
    byId("untraced-how").hidden = !model.trace;
    byId("untraced-never").hidden = Boolean(model.trace);
    byId("trace-command").textContent = `${model.trace} --chains ${plain(cell)} --seed ${cell.seed} --step all`;
    if (!steps) return;
    const asked = axis.steps[at.step] ?? steps.at(-1), place = nearest(steps, asked), step = steps[place];
    const kl = block.row("trace.kl", place), kept = block.row("trace.circuit", place);
    byId("trace-note").textContent = `Traced at step ${count(step)}${step === asked ? "" : `, the nearest to step ${count(asked)}`}: ${kept.reduce((a, b) => a + b)} of ${block.edges.length} edges keep ${percent(block.row("trace.faithfulness", place)[0])} of what the model says; of random sets of that size the best keeps ${percent(Math.max(0, block.row("trace.random", place)[0]))}.`;
    byId("circuit").replaceChildren(circuitGraph(model.senders, block.edges, kl, kept, phases[block.phases[place]]?.colour ?? "var(--ink)"));
    byId("edges").replaceChildren(edgeEffects(block, place, axis, phases));
    drawVerdicts(place);
  }

  function drawVerdicts(place) {
    const [holds, value, limit] = ["holds", "value", "limit"].map((part) => block.row(`trace.${part}`, place));
    const tables = new Map();
    block.criteria.forEach((full, index) => {
      const [hypothesis, ...criterion] = full.split(": ");
      if (!tables.has(hypothesis)) tables.set(hypothesis, []);
      tables.get(hypothesis).push([criterion.join(": "), holds[index], value[index], limit[index]]);
    });
    byId("verdicts").replaceChildren(...[...tables].map(([hypothesis, criteria]) => {
      const passes = criteria.every(([, yes]) => yes);
      return html("div", {}, html("h4", {}, `${hypothesis[0].toUpperCase()}${hypothesis.slice(1)}: `, html("span", { class: passes ? "yes" : "no" }, passes ? "pass" : "fail")),
        html("ul", {}, ...criteria.map(([text, yes, found, least]) => html("li", {}, html("span", { class: yes ? "yes" : "no" }, yes ? "yes" : "no"), ` ${text} (${nats(found)}, must exceed ${nats(least)})`))));
    }));
  }

  return { show, read, written: () => (own ? write(sequence).replaceAll(" ", ",") : null) };
}
