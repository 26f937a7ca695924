// The transformer and the reference predictors again, for the page: no script of the page but these
// computes a model.  They follow `transformer.py` and `predictors.py`, against which they are tested.

const NORM_EPSILON = 1e-6, ROTARY_BASE = 10000;
let halves = null; // all numbers of half precision

function halfTable() {
  if (halves) return halves;
  halves = new Float32Array(65536);
  for (let bits = 0; bits < 65536; bits++) {
    const exponent = (bits >> 10) & 31, fraction = bits & 1023;
    const size = exponent === 31 ? (fraction ? NaN : Infinity) : exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -24 * fraction;
    halves[bits] = bits >> 15 ? -size : size;
  }
  return halves;
}

/** Arrays by name, with their shapes, of a file in the layout of safetensors, and its metadata. */
function readArrays(bytes) {
  const length = Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true));
  const { __metadata__: metadata = {}, ...entries } = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + length)));
  const kinds = { F32: Float32Array, I32: Int32Array, U8: Uint8Array, BOOL: Uint8Array, F16: Uint16Array };
  const arrays = {};
  for (const [name, { dtype, shape, data_offsets: [from, to] }] of Object.entries(entries)) {
    if (!(dtype in kinds)) throw new Error(`${name}: no way to read ${dtype}`);
    // A copy begins at a multiple of its numbers' size, which the file need not.
    let data = new kinds[dtype](bytes.slice(8 + length + from, 8 + length + to).buffer);
    if (dtype === "F16") {
      const table = halfTable();
      data = Float32Array.from(data, (bits) => table[bits]);
    }
    arrays[name] = { shape, data };
  }
  return { arrays, metadata };
}

/** rows (count, into) @ weight (into, out), added to `sum` where it is given. */
function product(rows, weight, count, into, out, sum = new Float32Array(count * out)) {
  for (let row = 0; row < count; row++) {
    const target = row * out;
    for (let inner = 0; inner < into; inner++) {
      const factor = rows[row * into + inner], source = inner * out;
      if (factor !== 0) for (let column = 0; column < out; column++) sum[target + column] += factor * weight[source + column];
    }
  }
  return sum;
}

/** Root-mean-square or layer normalisation of each row. */
function normalised(stream, count, width, norm) {
  const result = Float32Array.from(stream);
  if (norm === "none") return result;
  for (let row = 0; row < count; row++) {
    const here = result.subarray(row * width, (row + 1) * width);
    if (norm === "layer") {
      const mean = here.reduce((sum, value) => sum + value, 0) / width;
      for (let place = 0; place < width; place++) here[place] -= mean;
    }
    const scale = 1 / Math.sqrt(here.reduce((sum, value) => sum + value * value, 0) / width + NORM_EPSILON);
    for (let place = 0; place < width; place++) here[place] *= scale;
  }
  return result;
}

/** Rotary positions of rows, in place. */
function rotated(rows, count, width) {
  for (let row = 0; row < count; row++)
    for (let pair = 0; pair < width; pair += 2) {
      const angle = row * ROTARY_BASE ** (-pair / width), cosine = Math.cos(angle), sine = Math.sin(angle);
      const even = rows[row * width + pair], odd = rows[row * width + pair + 1];
      rows[row * width + pair] = even * cosine - odd * sine;
      rows[row * width + pair + 1] = even * sine + odd * cosine;
    }
  return rows;
}

/** Causal attention: what is read at each position, and the weights (query, key). */
function attended(queries, keys, values, bias, length, width) {
  const mixed = new Float32Array(length * width), weights = new Float32Array(length * length);
  for (let query = 0; query < length; query++) {
    const here = weights.subarray(query * length, query * length + query + 1);
    let most = -Infinity, total = 0;
    for (let key = 0; key <= query; key++) {
      let logit = bias ? bias[query - key] : 0;
      for (let inner = 0; inner < width; inner++) logit += queries[query * width + inner] * keys[key * width + inner];
      here[key] = logit;
      if (logit > most) most = logit;
    }
    for (let key = 0; key <= query; key++) total += here[key] = Math.exp(here[key] - most);
    for (let key = 0; key <= query; key++) {
      here[key] /= total;
      for (let inner = 0; inner < width; inner++) mixed[query * width + inner] += here[key] * values[key * width + inner];
    }
  }
  return { mixed, weights };
}

/** What a hidden unit makes of its input: GELU in its form with tanh. */
const ACTIVATIONS = {
  relu: (value) => Math.max(0, value),
  gelu: (value) => (value / 2) * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (value + 0.044715 * value ** 3))),
};

function softmax(logits) {
  const most = Math.max(...logits), raised = logits.map((logit) => Math.exp(logit - most));
  const total = raised.reduce((sum, value) => sum + value, 0);
  return raised.map((value) => value / total);
}

/**
 * Run a model: `weights` by name as in a checkpoint, `config` as in TransformerConfig, `states` x_0..x_n.
 *
 * Returns logits and probabilities at each position, attention[layer][head] (query, key), and phi,
 * what the last layer's attention writes at the last position.
 */
function forwardPass(weights, config, states) {
  const { width, layers, heads, hidden, norm } = config, length = states.length, inner = width / heads;
  const data = (name) => weights[name].data;
  const activation = ACTIVATIONS[config.activation];
  const edges = config.circuit?.length ? new Set(config.circuit) : null;
  const senders = []; // [name, values (position, width)]
  const embedding = data("embedding");
  senders.push(["embed", Float32Array.from({ length: length * width }, (_, place) => embedding[states[Math.floor(place / width)] * width + (place % width)])]);
  if (config.positions === "absolute") senders.push(["pos", data("position").subarray(0, length * width)]);

  /** The normalised input of a receiver. */
  const read = (receiver, known) => {
    const total = new Float32Array(length * width);
    for (const [name, values] of senders.slice(0, known)) {
      if (edges && !edges.has(`${name}->${receiver}`)) continue;
      for (let place = 0; place < total.length; place++) total[place] += values[place];
    }
    return normalised(total, length, width, norm);
  };

  const attention = [], phi = new Float32Array(width);
  for (let layer = 0; layer < layers; layer++) {
    const known = senders.length;
    attention.push([]);
    for (let head = 0; head < heads; head++) {
      const name = `att${layer + 1}.${head}`;
      const matrix = (part) => data(`attentions.${layer}.${part}`).subarray(head * width * inner, (head + 1) * width * inner);
      const queries = product(read(`${name}.q`, known), matrix("query"), length, width, inner);
      const keys = product(read(`${name}.k`, known), matrix("key"), length, width, inner);
      const values = product(read(`${name}.v`, known), matrix("value"), length, width, inner);
      if (config.positions === "rotary") {
        rotated(queries, length, inner);
        rotated(keys, length, inner);
      }
      for (let place = 0; place < queries.length; place++) queries[place] /= Math.sqrt(inner);
      let bias = null;
      if (config.positions === "relative" && (!edges || edges.has(`lag->${name}`))) {
        const { shape, data: biases } = weights[`attentions.${layer}.lag_bias`];
        bias = biases.subarray(head * shape[1], (head + 1) * shape[1]);
      }
      const { mixed, weights: pattern } = attended(queries, keys, values, bias, length, inner);
      const written = product(mixed, matrix("output"), length, inner, width);
      senders.push([name, written]);
      attention[layer].push(pattern);
      if (layer === layers - 1) for (let place = 0; place < width; place++) phi[place] += written[written.length - width + place];
    }
    if (config.attention_only) continue;
    const active = product(read(`mlp${layer + 1}`, senders.length), data(`mlps.${layer}.weight_in`), length, width, hidden);
    const biasIn = data(`mlps.${layer}.bias_in`), biasOut = data(`mlps.${layer}.bias_out`);
    for (let place = 0; place < active.length; place++) active[place] = activation(active[place] + biasIn[place % hidden]);
    const written = product(active, data(`mlps.${layer}.weight_out`), length, hidden, width);
    for (let place = 0; place < written.length; place++) written[place] += biasOut[place % width];
    senders.push([`mlp${layer + 1}`, written]);
  }
  const size = weights.unembedding.shape[1];
  const flat = product(read("out", senders.length), data("unembedding"), length, width, size);
  const logits = Array.from({ length }, (_, row) => Array.from(flat.subarray(row * size, (row + 1) * size)));
  return { logits, probabilities: logits.map(softmax), attention, phi };
}

/**
 * The references' probabilities of the state that comes after `states`, by name; null where a reference
 * is undefined, because no chain of the set, or of the prior, can produce the states.
 */
function referencePredictions(states, { C, onePoint, pseudoCounts, successors, chains }) {
  const one = new Array(C).fill(0), two = new Array(C * C).fill(0), current = states.at(-1);
  states.forEach((state, place) => {
    one[state]++;
    if (place) two[states[place - 1] * C + state]++;
  });
  const shares = (counts, pseudo) => {
    const total = counts.reduce((sum, value, state) => sum + value + pseudo[state], 0);
    return counts.map((value, state) => (value + pseudo[state]) / total);
  };
  const row = two.slice(current * C, (current + 1) * C), seen = row.filter((times) => times > 0).length;
  // Of states that were not seen, only some can follow where chains are sparse.
  const share = successors < C ? (successors - seen) / (C - seen) : 1;
  const pseudo = pseudoCounts.slice(current * C, (current + 1) * C).map((value, state) => (row[state] ? value : share * value));
  const found = {
    "1-Gen": onePoint ? shares(one, onePoint) : new Array(C).fill(1 / C), // every law is uniform
    "2-Gen": seen > successors ? null : shares(row, pseudo),
  };
  if (!chains) return found;
  const { count, transition, stationary, prior } = chains; // prior: the weight of each
  /** The mean of the chains' rows of the current state, weighted by their prior and exp(log weight). */
  const mean = (logWeight) => {
    const logs = Array.from({ length: count }, (_, chain) => Math.log(prior[chain]) + logWeight(chain));
    const most = logs.reduce((one, other) => Math.max(one, other), -Infinity); // of any number of chains
    if (most === -Infinity) return null;
    const mixed = new Array(C).fill(0);
    logs.forEach((log, chain) => {
      const weight = Math.exp(log - most);
      for (let next = 0; next < C; next++) mixed[next] += weight * transition[(chain * C + current) * C + next];
    });
    const total = mixed.reduce((sum, value) => sum + value, 0);
    return total > 0 ? mixed.map((value) => value / total) : null;
  };
  // 0 log 0 is 0, and a state that a chain never visits rules it out.
  const evidence = (counts, table, from) => counts.reduce((sum, times, place) => sum + (times ? times * Math.log(table[from + place]) : 0), 0);
  found["1-Mem"] = mean((chain) => evidence(one, stationary, chain * C));
  found["2-Mem"] = mean((chain) => Math.log(stationary[chain * C + states[0]]) + evidence(two, transition, chain * C * C));
  return found;
}
