/**
 * The inside of the models: what one predicts from a sequence, where it looks, its task vectors, its circuit.
 *
 * Returns `show(cell, step)`.  The models run here, from the parameters in the page, so that the
 * sequence can be edited; they are unpacked when their cell is looked at.
 */
function insideModels({ axis, cells, phases }, model, plain) {
  const { states: size, context, config } = model;
  const choose = byId("choose-sequence"), edit = byId("states"), fault = byId("states-fault");
  const letters = size <= 10; // a state is one digit
  const write = (states) => Array.from(states).join(letters ? "" : " ");
  const blocks = new Map();
  let at = { cell: 0, step: 0 }, block = null, sequence = null;

  /** The arrays of a cell, unpacked once; null while the page has not come so far. */
  async function arraysOf(cell) {
    if (!byId(`cell-${cell}`)) return null;
    if (!blocks.has(cell)) blocks.set(cell, unpack(`cell-${cell}`).then(readBlock));
    return blocks.get(cell);
  }

  function readBlock(bytes) {
    const { arrays, metadata } = readArrays(bytes);
    const listed = (name) => (metadata[name] ? JSON.parse(metadata[name]) : []);
    const steps = arrays.steps ? Array.from(arrays.steps.data) : [];
    const rows = (name) => {
      if (!arrays[name]) return [];
      const { shape: [number, length], data } = arrays[name];
      return Array.from({ length: number }, (_, row) => Array.from(data.subarray(row * length, (row + 1) * length)));
    };
    /** The parameters of the checkpoint at a place in `steps`. */
    const weights = (place) => Object.fromEntries(Object.entries(arrays).flatMap(([name, { shape, data }]) => {
      if (!name.startsWith("weights.")) return [];
      const length = data.length / shape[0];
      return [[name.slice(8), { shape: shape.slice(1), data: data.subarray(place * length, (place + 1) * length) }]];
    }));
    const chains = arrays.transition && { count: arrays.transition.shape[0], transition: arrays.transition.data, stationary: arrays.stationary.data };
    return {
      steps, weights, rows, arrays, edges: listed("edges"), criteria: listed("criteria"), planes: new Map(),
      tables: { C: size, pseudoCount: model.pseudoCount, concentration: model.concentration, chains: chains ?? null },
    };
  }

  const nearest = (steps, step) => {
    const far = Array.from(steps, (other) => Math.abs(Math.log(other + 1) - Math.log(step + 1)));
    return far.indexOf(Math.min(...far));
  };

  async function show(cell, step) {
    at = { cell, step };
    const found = await arraysOf(cell);
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
    const options = block.rows("sequences").flatMap((states, place) => {
      const turn = place - index.indexOf(index[place]);
      return turn > 1 ? [] : [[`${fresh ? "fresh chain" : "chain"} ${index[place] + 1}, ${turn ? "another" : "a"} sequence`, states]];
    });
    if (!fresh) block.rows("fresh").slice(0, 4).forEach((states, place) => options.push([`fresh chain ${place + 1} (OOD)`, states]));
    choose.replaceChildren(...options.map(([name, states]) => html("option", { value: write(states) }, name)));
    if (sequence === null && options.length) take(options[0][1]);
    else choose.value = sequence === null ? "" : write(sequence);
  }

  function take(states) {
    sequence = states;
    edit.value = write(states);
    choose.value = edit.value;
    complain("");
  }

  function complain(message) {
    fault.textContent = message;
    edit.setAttribute("aria-invalid", message !== "");
  }

  /** The states that were typed; what is wrong with them is said, and the last right ones stay. */
  function readStates() {
    const parts = letters ? [...edit.value.replaceAll(/[\s,]/g, "")] : edit.value.split(/[\s,]+/).filter(Boolean);
    const wrong = parts.findIndex((part) => !/^\d+$/.test(part) || +part >= size);
    if (wrong >= 0) return complain(`State ${wrong + 1}: expected a whole number from 0 to ${size - 1}, got ${parts[wrong]}`);
    if (!parts.length) return complain("Expected at least one state");
    if (parts.length > context) return complain(`Expected at most ${context} states, the model's context; got ${parts.length}`);
    complain("");
    sequence = parts.map(Number);
    choose.value = write(sequence);
    drawModel();
  }

  choose.addEventListener("change", () => { edit.value = choose.value; readStates(); });
  edit.addEventListener("input", readStates);

  // ---- what the model does with it ----
  function drawModel() {
    const has = block !== null && block.steps.length > 0 && sequence !== null;
    byId("inside").hidden = !has;
    const asked = axis.steps[at.step];
    if (!has) {
      byId("inside-note").textContent = cells[at.cell].steps
        ? "This page has no parameters of this model: none could be saved, or the run has more of them than a page can hold."
        : "Nothing is saved of this model.";
      return;
    }
    const place = nearest(block.steps, asked), step = block.steps[place];
    byId("inside-note").textContent = `Model at step ${count(step)}${step === asked ? "" : `, nearest to step ${count(asked)} of the ${block.steps.length} checkpoints that the page holds`}.`;
    const weights = block.weights(place), run = forwardPass(weights, config, sequence);
    drawPredictions(run);
    drawAttention(run);
    drawPlane(place, run.phi);
  }

  function drawPredictions({ probabilities }) {
    const rows = { model: probabilities.at(-1), ...referencePredictions(sequence, block.tables) };
    const border = Object.fromEntries(Object.values(phases).map((phase) => [phase.reference, phase.colour]));
    const divergence = (from) => from.reduce((sum, p, state) => sum + (p > 0 ? p * Math.log(p / rows.model[state]) : 0), 0);
    const head = html("tr", {}, html("td", {}), ...rows.model.map((_, state) => html("th", { scope: "col", class: "number" }, state)),
      html("th", { scope: "col", class: "number" }, "KL, nats"));
    const body = Object.entries(rows).map(([name, row]) => html("tr", { class: name === "model" ? "own" : "" },
      html("th", { scope: "row" }, html("i", { class: "line", style: `border-color: ${border[name] ?? "var(--ink)"}` }), name),
      ...(row ?? rows.model).map((probability) => html("td", { class: "number" },
        ...(row ? [html("i", { class: "bar", style: `height: ${(1.9 * probability).toFixed(3)}rem; background: ${border[name] ?? "var(--ink)"}` }), probability.toFixed(3).replace("0.", ".")] : ["–"]))),
      html("td", { class: "number" }, name === "model" || !row ? "" : nats(divergence(row)))));
    byId("predictions").replaceChildren(html("thead", {}, head), html("tbody", {}, ...body));
    const missing = cells[at.cell].chains !== "∞" && !block.tables.chains;
    byId("predictions-note").textContent = missing ? "The set of chains is too large for this page: the memorising references are left out." : "";
  }

  function drawAttention({ attention }) {
    const n = sequence.length, current = sequence[n - 1];
    byId("attention").replaceChildren(...attention.flatMap((heads, layer) => heads.map((pattern, head) => {
      const name = heads.length > 1 ? `att${layer + 1}.${head}` : `att${layer + 1}`;
      const last = pattern.subarray((n - 1) * n), most = Math.max(...last);
      const canvas = html("canvas", { width: n, height: n, role: "img", "aria-label": `Attention of ${name}: ${n} queries down, ${n} keys across` });
      const ink = colour("ink"), paint = canvas.getContext("2d"), image = paint.createImageData(n, n);
      const [red, green, blue] = [1, 3, 5].map((place) => parseInt(ink.slice(place, place + 2), 16));
      pattern.forEach((weight, place) => image.data.set([red, green, blue, 255 * Math.sqrt(weight)], 4 * place));
      paint.putImageData(image, 0, 0);
      const strip = svg("svg", { viewBox: `0 0 ${12 * n + 34} 104`, width: 12 * n + 34, height: 104, role: "img", "aria-label": `Attention of ${name} from the last position; most, ${percent(most)}, to position ${last.indexOf(most)}` },
        svg("text", { x: 28, y: 14, class: "quiet", "text-anchor": "end" }, percent(most)), svg("path", { class: "rule", d: `M32 10H${12 * n + 32}M32 84H${12 * n + 32}` }));
      last.forEach((weight, key) => {
        const follows = key > 0 && sequence[key - 1] === current, height = (74 * weight) / most;
        strip.append(svg("rect", { x: 33 + 12 * key, y: 84 - height, width: 10, height, fill: follows ? "var(--G2)" : "var(--muted)" },
          svg("title", {}, `position ${key}, state ${sequence[key]}: ${(100 * weight).toFixed(1)} %`)));
        strip.append(svg("text", { x: 38 + 12 * key, y: 99, class: key === n - 1 ? "" : "quiet", "text-anchor": "middle" }, sequence[key]));
      });
      return html("div", { class: "head" }, html("figure", {}, html("figcaption", {}, html("b", {}, name), "all positions: queries down, keys across"), canvas),
        html("figure", {}, html("figcaption", {}, html("b", {}, "From the last position"), "share of attention to each state of the context"),
          html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${name} from the last position` }, strip)));
    })));
  }

  // ---- task vectors ----
  const breath = () => new Promise((resolve) => { setTimeout(resolve); });

  /** Task vectors of the sequences in the page at a checkpoint, in two components; null if the reader went on. */
  async function planeOf(place, still) {
    if (block.planes.has(place)) return block.planes.get(place);
    const here = block, weights = here.weights(place), vectors = [];
    for (const states of here.rows("sequences")) {
      if (vectors.length % 8 === 0) await breath();
      if (!still()) return null;
      vectors.push(forwardPass(weights, config, states, "phi").phi);
    }
    const plane = { ...twoComponents(vectors, config.width) };
    const end = here.steps.length - 1;
    if (place !== end) {
      const last = await planeOf(end, still);
      if (last === null) return null;
      plane.points = alignTo(plane.points, last.points);
    }
    here.planes.set(place, plane);
    return plane;
  }

  async function drawPlane(place) {
    const here = block, { cell, step } = at;
    const plane = await planeOf(place, () => block === here && at.cell === cell && at.step === step);
    if (plane === null) return;
    const index = here.arrays.sequence_chain.data, reach = 1.1 * Math.max(1e-9, ...plane.points.flat().map(Math.abs));
    const spot = (value) => 160 + (140 * value) / reach;
    const figure = svg("svg", { viewBox: "0 0 320 320", role: "img", "aria-label": `Task vectors of ${plane.points.length} sequences in two components` },
      svg("path", { class: "rule", d: "M20 160H300M160 20V300" }));
    plane.points.forEach(([x, y], sequence) => figure.append(
      svg("circle", { cx: spot(x).toFixed(1), cy: spot(-y).toFixed(1), r: 4, fill: `hsl(${45 * index[sequence]} 70% ${index[sequence] % 2 ? 42 : 56}%)` },
        svg("title", {}, `chain ${index[sequence] + 1}`))));
    figure.append(svg("text", { x: 160, y: 317, class: "quiet", "text-anchor": "middle" }, `first component, ${percent(plane.shares[0])} of the variance`),
      svg("text", { x: -160, y: 12, class: "quiet", "text-anchor": "middle", transform: "rotate(-90)" }, `second component, ${percent(plane.shares[1])}`));
    byId("plane").replaceChildren(figure);
  }

  // ---- what was traced ----
  function drawTrace() {
    const cell = cells[at.cell], steps = block.arrays["trace.step"]?.data;
    byId("traced").hidden = !steps;
    byId("untraced").hidden = Boolean(steps) || !cell.steps;
    byId("trace-command").textContent = `${model.trace} --chains ${plain(cell)} --seed ${cell.seed} --step all`;
    if (!steps) return;
    const asked = axis.steps[at.step], place = nearest(steps, asked), step = steps[place], edges = block.edges.length;
    const row = (name, length) => block.arrays[`trace.${name}`].data.subarray(place * length, (place + 1) * length);
    const kl = row("kl", edges), kept = row("circuit", edges), phase = cell.phase[axis.steps.indexOf(step)];
    const tint = phases[phase]?.colour ?? "var(--ink)";
    byId("trace-note").textContent = `Traced at step ${count(step)}${step === asked ? "" : `, the nearest to step ${count(asked)}`}: ${kept.reduce((a, b) => a + b)} of ${edges} edges keep ${percent(row("faithfulness", 1)[0])} of what the model says; ${block.arrays["trace.random"] ? `of random sets of that size the best keeps ${percent(Math.max(0, row("random", 1)[0]))}` : ""}.`;
    byId("circuit").replaceChildren(circuitGraph(model.senders, block.edges, kl, kept, tint));
    byId("edges").replaceChildren(edgeEffects(block, place, axis, cell, phases));
    drawVerdicts(row);
  }

  function drawVerdicts(row) {
    const number = block.criteria.length, [holds, value, limit] = ["holds", "value", "limit"].map((part) => row(part, number));
    const tables = new Map();
    block.criteria.forEach((full, place) => {
      const [hypothesis, ...criterion] = full.split(": ");
      if (!tables.has(hypothesis)) tables.set(hypothesis, []);
      tables.get(hypothesis).push([criterion.join(": "), holds[place], value[place], limit[place]]);
    });
    byId("verdicts").replaceChildren(...[...tables].map(([hypothesis, criteria]) => {
      const passes = criteria.every(([, yes]) => yes);
      return html("div", {}, html("h4", {}, `${hypothesis[0].toUpperCase()}${hypothesis.slice(1)}: `, html("span", { class: passes ? "yes" : "no" }, passes ? "pass" : "fail")),
        html("ul", {}, ...criteria.map(([text, yes, found, least]) => html("li", {}, html("span", { class: yes ? "yes" : "no" }, yes ? "yes" : "no"), ` ${text} (${found.toFixed(3)}, must exceed ${least.toFixed(3)})`))));
    }));
  }

  return show;
}
