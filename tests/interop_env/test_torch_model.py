"""The torch port computes what iclens computes, and nnsight reads and changes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import nnsight
import numpy as np
import pytest
import torch

from iclens import Transformer, TransformerConfig, export_model, forward
from iclens.interop.torch_model import load


@pytest.fixture(scope="module")
def port(model: Transformer, tmp_path_factory) -> torch.nn.Module:
    path = tmp_path_factory.mktemp("port")
    export_model(model, "torch", path)
    return load(path / "model.safetensors")


def test_its_logits_are_ours(model: Transformer, port, states: np.ndarray) -> None:
    for some in (states, states[:2, :7]):
        found = port(torch.tensor(some)).detach()
        np.testing.assert_allclose(found, model(jnp.asarray(some)), atol=1e-5)


def test_nnsight_reads_what_iclens_computes(model: Transformer, port, states) -> None:
    ours = forward(model, jnp.asarray(states))
    wrapped = nnsight.NNsight(port)
    patterns, written = [], []
    with wrapped.trace(torch.tensor(states)):
        for block in wrapped.blocks:
            patterns.append(block.attention.pattern.output.save())
            written.append(block.attention.written.output.save())
    senders = dict(zip(model.config.senders, ours.senders.values, strict=True))
    for layer, pattern in enumerate(ours.attention):
        np.testing.assert_allclose(patterns[layer].detach(), pattern, atol=1e-5)
        for head in range(model.config.heads):
            found = written[layer][:, head].detach()
            np.testing.assert_allclose(found, senders[f"att{layer + 1}.{head}"], atol=1e-5)


@pytest.mark.parametrize("port_name", ["query", "key", "value"])
def test_an_edge_cut_in_nnsight_is_the_edge_cut_here(
    model: Transformer, port, states: np.ndarray, port_name: str, cut
) -> None:
    if model.config.layers < 2:
        return
    last = model.config.heads - 1
    edge = f"att1.0->att2.{last}.{port_name[0]}"
    wrapped = nnsight.NNsight(port)
    with wrapped.trace(torch.tensor(states)):
        sent = wrapped.blocks[0].attention.written.output[:, 0]
        read = getattr(wrapped.blocks[1].attention, f"read_{port_name}")
        changed = read.output.clone()
        changed[:, last] = changed[:, last] - sent
        read.output = changed
        logits = wrapped.output.save()
    np.testing.assert_allclose(logits.detach(), cut(model, lambda name: name == edge), atol=1e-5)


def test_the_folder_is_all_that_torch_needs(states: np.ndarray, tmp_path: Path) -> None:
    model = Transformer(TransformerConfig(width=8), 3, states.shape[1], key=jax.random.key(0))
    exported = export_model(model, "torch", tmp_path / "out")
    np.save(tmp_path / "states.npy", states)
    program = f"""
import numpy, sys, torch
sys.modules["iclens"] = None  # whoever imports it fails
{exported.python}
states = numpy.load({str(tmp_path / "states.npy")!r})
numpy.save({str(tmp_path / "logits.npy")!r}, model(torch.tensor(states)).detach())
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    logits = np.load(tmp_path / "logits.npy")
    np.testing.assert_allclose(logits, model(jnp.asarray(states)), atol=1e-5)
