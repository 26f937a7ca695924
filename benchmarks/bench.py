"""`make bench`: the train step beside PyTorch's, the references, an evaluation, the theory.

Both frameworks alternate in one process, pinned to one core or to two; medians are printed, and
the aims beside them.  Ours includes drawing the batches; PyTorch's repeats one batch.

The share of the peak is the floating-point operations of the matrix products of a step, forward
once and backward twice, over its time and the fastest square product of jax or numpy.  Of attention
they count what is computed: the keys up to the end of each block of queries.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

SIZES = {  # states, context, width, batch, steps a round
    "quick": (4, 48, 32, 32, 192),
    "paper": (10, 128, 64, 64, 64),
}
AIMS = {"quick": (2.2, 0.45), "paper": (1.5, 0.60)}  # times torch, share of the peak; one thread
ROUNDS = 5
PEAK_REPEATS = 4  # products a round and library


def main() -> None:
    print("train step, ms (median of alternating rounds; aims are for one thread)")
    print(
        "size   threads  iclens   torch   ratio   aim         share of peak   aim         "
        "GFLOP/s at peak   first loss, iclens and torch"
    )
    cores = min(2, len(os.sched_getaffinity(0)))
    for size in SIZES:
        for threads in range(1, cores + 1):
            got = worker("train_step", size, str(threads))
            ratio = got["torch"] / got["ours"]
            faster, share = (
                (verdict(aim, value >= aim) if threads == 1 else "")
                for aim, value in zip(AIMS[size], (ratio, got["share"]), strict=True)
            )
            print(
                f"{size}  {threads:7}  {got['ours']:6.2f}  {got['torch']:6.2f}  {ratio:6.2f}   "
                f"{faster:10}  {got['share']:13.2f}   {share:10}  {got['peak'] / 1e9:15.0f}   "
                f"{got['our_loss']:.7f} {got['torch_loss']:.7f}"
            )
    print()
    ratios = worker("interventions")
    for label, name, most in (
        ("effects of all 25 edges, in clean forward passes", "effects", 12.0),
        ("attribution to all 25 edges (EAP), in clean forward passes", "eap", 4.0),
    ):
        print(f"{label:60}{ratios[name]:6.2f}     {verdict(most, ratios[name] <= most)}")
    for label, measure, aim in (
        ("four references, 256 sequences, N = 128, C = 10, K = 10,000", "references", 10.0),
        ("evaluation of one checkpoint, K = 1,024", "evaluation", 1.0),
        ("iclens --help", "show_help", 0.7),
        ("induction: coefficients at N = 4096, C = 5 (to 3 %)", "coefficients", 60.0),
        ("induction: landscape of 101 x 101 at N = 128", "landscape", 60.0),
        ("induction: one tau_2Gen at N = 512", "half_time", 60.0),
    ):
        got = worker(measure)
        error = f", error {got['error']:.1%}" if "error" in got else ""
        print(f"{label:60}{got['seconds']:6.2f} s   {verdict(aim, got['seconds'] < aim)}{error}")


def verdict(aim: float, met: bool) -> str:
    return f"{aim:.2f} {'met' if met else 'missed'}"


def worker(*arguments: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def train_step(size: str, threads: str) -> dict[str, float]:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(threads)])
    import jax
    import jax.numpy as jnp
    import numpy as np
    import torch
    import torch_reference

    from iclens import ChainPrior, TrainingConfig, Transformer, TransformerConfig, initial_state
    from iclens.training import next_state_loss, train
    from iclens.transformer import QUERY_BLOCK

    torch.set_num_threads(int(threads))
    states, context, width, batch, steps = SIZES[size]
    chains = ChainPrior(states).sample(jax.random.key(0), 64)
    model = Transformer(TransformerConfig(width=width), states, context, key=jax.random.key(1))
    reference = torch_reference.Reference(states, width, context)
    torch_reference.load(reference, model)
    sequences, transition = chains.draw(jax.random.key(2), batch, context + 1)
    batch_torch = torch.tensor(np.asarray(sequences), dtype=torch.long)
    loss = jax.jit(next_state_loss, static_argnums=3)
    our_loss = float(loss(model, sequences, transition, "sampled"))
    torch_loss = torch_reference.loss(reference, batch_torch).item()
    assert abs(our_loss - torch_loss) < 1e-5, "the two models are not the same"

    config = TrainingConfig(steps=steps, batch=batch, evaluations=1)
    optimizer = torch.optim.Adam(reference.parameters(), lr=config.learning_rate)
    square = np.ones((1024, 1024), np.float32)
    ours_square, multiply = jnp.asarray(square), jax.jit(jnp.matmul)

    def run_ours() -> None:
        *_, last = train(initial_state(model, config), chains, config, key=jax.random.key(3))
        assert last.step == steps

    def run_torch() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            torch_reference.loss(reference, batch_torch).backward()
            optimizer.step()

    times: dict[str, list[float]] = {}
    for number in range(ROUNDS + 1):
        for name, run in (
            ("ours", run_ours),
            ("torch", run_torch),
            *PEAK_REPEATS
            * (("jax", lambda: multiply(ours_square, ours_square).block_until_ready()),),
            *PEAK_REPEATS * (("numpy", lambda: square @ square),),
        ):
            start = time.perf_counter()
            run()
            if number:  # the first round compiles
                times.setdefault(name, []).append(time.perf_counter() - start)
    ours, other = (float(np.median(times[name])) / steps for name in ("ours", "torch"))
    peak = 2 * 1024**3 / min(times["jax"] + times["numpy"])
    tokens = batch * context
    ends = [min(start + QUERY_BLOCK, context) for start in range(0, context, QUERY_BLOCK)]
    starts = range(0, context, QUERY_BLOCK)
    pairs = batch * sum((end - start) * end for start, end in zip(starts, ends, strict=True))
    dense = tokens * (2 * 12 * width**2 + width * states)
    forward = 2 * (dense + 2 * 2 * pairs * width)
    return {
        "ours": 1e3 * ours,
        "torch": 1e3 * other,
        "share": 3 * forward / ours / peak,
        "peak": peak,
        "our_loss": our_loss,
        "torch_loss": torch_loss,
    }


def references() -> dict[str, float]:
    import jax

    from iclens import ChainPrior, reference_predictors

    prior = ChainPrior(10)
    chains = prior.sample(jax.random.key(0), 10_000)
    states, _ = chains.sample(jax.random.key(1), 256, 128)
    start = time.perf_counter()
    for predictor in reference_predictors(chains, prior).values():
        predictor(states).block_until_ready()
    return {"seconds": time.perf_counter() - start}


def evaluation() -> dict[str, float]:
    """References, distances, composition and errors of one checkpoint at the quick size."""
    import jax
    import numpy as np

    from iclens import ChainPrior, Transformer, TransformerConfig, score

    prior = ChainPrior(4)
    chains = prior.sample(jax.random.key(0), 1024)
    states, _ = chains.sample(jax.random.key(1), 512, 48)
    model = Transformer(TransformerConfig(), 4, 48, key=jax.random.key(2))
    log_probs = jax.jit(lambda model, states: jax.nn.log_softmax(model(states)))
    times = []
    for _ in range(4):
        start = time.perf_counter()
        score(lambda states: log_probs(model, states), states, chains, prior)
        times.append(time.perf_counter() - start)
    return {"seconds": float(np.median(times[1:]))}


def interventions() -> dict[str, float]:
    """Exact effects and attribution over a clean pass of the same sequences, one after another."""
    import equinox as eqx
    import jax
    import numpy as np

    from iclens import (
        ChainPrior,
        TrainingConfig,
        Transformer,
        TransformerConfig,
        forward,
        initial_state,
        train,
    )
    from iclens.circuits.interventions import attribution, contrast, edge_effects

    start = Transformer(TransformerConfig(width=64), 4, 48, key=jax.random.key(0))
    recipe = TrainingConfig(steps=500)
    *_, end = train(initial_state(start, recipe), ChainPrior(4), recipe, key=jax.random.key(2))
    model = end.state.model
    on = contrast("resample", ChainPrior(4), 512, 48, key=jax.random.key(1))
    clean = eqx.filter_jit(lambda model, states: forward(model, states).logits)
    times: dict[str, list[float]] = {}
    for number in range(ROUNDS + 1):
        for name, run in (
            ("clean", lambda: clean(model, on.states).block_until_ready()),
            ("effects", lambda: edge_effects(model, on).kl.block_until_ready()),
            ("eap", lambda: attribution(model, on)),
            ("clean", lambda: clean(model, on.states).block_until_ready()),
        ):
            start = time.perf_counter()
            run()
            if number:
                times.setdefault(name, []).append(time.perf_counter() - start)
    median = {name: float(np.median(taken)) for name, taken in times.items()}
    return {name: median[name] / median["clean"] for name in ("effects", "eap")}


def coefficients() -> dict[str, float]:
    """Seconds to c_beta, c_delta and J at N = 4096, C = 5; the largest relative error of two."""
    from iclens.lab.reduced import InductionStudy
    from iclens.lab.reduced import coefficients as measure

    start = time.perf_counter()
    found = measure(InductionStudy(states=5, context=4096))
    seconds = time.perf_counter() - start
    error = max(found[name]["error"] / found[name]["value"] for name in ("c_beta", "J"))
    return {"seconds": seconds, "error": error}


def landscape() -> dict[str, float]:
    """Seconds to the loss on a grid of 101 x 101 at N = 128, with flow and descent."""
    from iclens.lab.reduced import InductionStudy, plane

    start = time.perf_counter()
    plane(InductionStudy(), context=128, size=101)
    return {"seconds": time.perf_counter() - start}


def half_time() -> dict[str, float]:
    """Seconds to tau_2Gen of the reduced model at N = 512."""
    from iclens.lab.reduced import InductionStudy, growth_times

    start = time.perf_counter()
    growth_times(InductionStudy(), [512])
    return {"seconds": time.perf_counter() - start}


def show_help() -> dict[str, float]:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "iclens.cli", "--help"], stdout=subprocess.DEVNULL, check=True
        )
        times.append(time.perf_counter() - start)
    return {"seconds": sorted(times)[len(times) // 2]}


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        name, *rest = sys.argv[1:]
        print(json.dumps(globals()[name](*rest)))
