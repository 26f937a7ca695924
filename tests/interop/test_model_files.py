"""Files of one model: whole there and back, and nothing else is taken for one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from iclens.interop.files import load_model, save_model
from iclens.lab.files import (
    read_arrays_and_metadata,
    tree_to_arrays,
    write_arrays,
)
from iclens.transformer import Transformer, TransformerConfig

CONFIGS = [
    TransformerConfig(width=8, heads=2, positions=positions, norm=norm, attention_only=alone)
    for positions, norm, alone in (
        ("relative", "rms", False),
        ("absolute", "layer", True),
        ("rotary", "none", False),
        ("none", "rms", True),
    )
] + [TransformerConfig(width=4, layers=1, hidden=3, circuit=("embed->att1.0.v", "att1.0->out"))]


def model_of(config: TransformerConfig) -> Transformer:
    return Transformer(config, states=3, context=6, key=jax.random.key(1))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.positions}-{c.norm}-{c.layers}")
def test_a_model_comes_back_whole(config: TransformerConfig, tmp_path: Path) -> None:
    model = model_of(config)
    save_model(tmp_path / "m.safetensors", model, {"source": "a test"})
    loaded = load_model(tmp_path / "m.safetensors")
    assert loaded.config == config
    assert loaded.context == 6
    before, after = tree_to_arrays(model), tree_to_arrays(loaded)
    assert before.keys() == after.keys()
    for name, array in before.items():
        assert np.array_equal(array, after[name]), name
    assert read_arrays_and_metadata(tmp_path / "m.safetensors")[1]["source"] == "a test"


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("written") / "m.safetensors"
    save_model(path, model_of(TransformerConfig(8, heads=2, positions="absolute", norm="layer")))
    return path


def changed(written: Path, tmp_path: Path, arrays=None, **about: object) -> Path:
    """The written model with other arrays (None takes one away) and another description."""
    saved, metadata = read_arrays_and_metadata(written)
    described = json.loads(metadata["iclens"])
    model = {**described["model"], **about.pop("model", {})}
    metadata["iclens"] = json.dumps({**described, "model": model, **about})
    kept = {n: a for n, a in {**saved, **(arrays or {})}.items() if a is not None}
    write_arrays(tmp_path / "changed.safetensors", kept, metadata)
    return tmp_path / "changed.safetensors"


FLOATS = np.zeros((2, 8, 4), np.float32)


@pytest.mark.parametrize(
    ("arrays", "about", "told"),
    [
        ({"attentions.1.key": None}, {}, "attentions.1.key: expected an array of shape (2, 8, 4)"),
        ({"attentions.1.key": FLOATS[:, :, :3]}, {}, "attentions.1.key: expected shape (2, 8, 4)"),
        ({"attentions.1.key": FLOATS.astype(np.float64)}, {}, "of float64"),
        ({"attentions.2.bias": FLOATS}, {}, "attentions.2.bias: the model described has no such"),
        ({"embedding": None}, {}, "embedding: expected shape (3, width), got (0,)"),
        ({}, {"states": 4}, "embedding: expected shape (4, width), got (3, 8)"),
        ({}, {"states": 3.0}, "the description of the model is damaged"),
        ({}, {"context": -1}, "a context of at least 1"),
        ({}, {"context": 10**30}, "position: expected shape (1000000000000"),
        ({}, {"format": 2}, "expected format 1, got 2"),
        ({}, {"model": {"layers": 10**9}}, "expected 1000000000 layers, got 2"),
        ({}, {"model": {"heads": 3}}, "model.heads: expected a divisor of model.width = 8, got 3"),
        ({}, {"model": {"width": 16}}, "embedding: expected shape (3, 16)"),
        ({}, {"model": {"hidden": 10**30}}, "mlps.0.weight_in: expected shape (8, 1000000000000"),
        ({}, {"model": {"nrom": "rms"}}, "unknown key 'model.nrom'; did you mean 'model.norm'?"),
        ({}, {"model": {"norm": "batch"}}, "norm"),
        ({}, {"model": {"circuit": ["embed->nowhere"]}}, "unknown edge 'embed->nowhere'"),
    ],
)
def test_another_model_than_the_one_described_is_refused(
    written: Path, tmp_path: Path, arrays, about, told
) -> None:
    path = changed(written, tmp_path, arrays, **about)
    with pytest.raises(ValueError, match=re.escape(told)) as refusal:
        load_model(path)
    assert str(path) in str(refusal.value)


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with pytest.raises(FileNotFoundError):
        load_model(path)
    path.write_bytes(b"not safetensors")
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        load_model(path)
    write_arrays(path, {"embed.W_E": FLOATS})
    with pytest.raises(ValueError, match="its metadata has no 'iclens'"):
        load_model(path)
    for text in ("[" * 100_000, "7", '{"format": 1}', "null", '{"format": 1, "model": []}'):
        write_arrays(path, {"embed.W_E": FLOATS}, {"iclens": text})
        with pytest.raises(ValueError, match="the description of the model is damaged"):
            load_model(path)


def test_the_keys_of_the_layout_are_its_own(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'sha256' is the layout's own"):
        save_model(tmp_path / "m", model_of(CONFIGS[0]), {"sha256": ""})


def test_a_changed_description_does_not_match_the_checksum(written: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(written.read_bytes().replace(b'\\"layer\\"', b'\\"rms\\"  '))
    with pytest.raises(ValueError, match="does not match its checksum"):
        load_model(path)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_file_is_answered_with_a_traceback(written: Path, tmp_path: Path, data) -> None:
    content = bytearray(written.read_bytes())
    if data.draw(st.booleans(), "cut"):
        del content[data.draw(st.integers(0, len(content)), "at") :]
    for _ in range(data.draw(st.integers(0, 3), "changes")):
        if content:
            place = data.draw(st.integers(0, min(len(content), 1500) - 1), "place")
            content[place] = data.draw(st.integers(0, 255), "byte")
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    try:
        model = load_model(path)
    except ValueError:
        return
    assert bytes(content) == written.read_bytes()
    assert jnp.isfinite(model.unembedding).all()
