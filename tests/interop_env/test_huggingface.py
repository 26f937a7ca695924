"""A language model of Hugging Face's format, built and trained here, scored by its tokens."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from iclens.chains import ChainPrior, ChainSet
from iclens.cli import dispatch
from iclens.interop import huggingface
from iclens.interop.huggingface import LanguageModel, open_language_model
from iclens.scoring import score_contexts

WORDS = [" a", " b", " c", " hello"]
STEP = np.array([[0.1, 0.8, 0.1], [0.1, 0.1, 0.8], [0.8, 0.1, 0.1]])
# Whatever order its states are in, this set is the same set: 0 -> 1 -> 2 -> 0 and back.
CHAINS = ChainSet(np.stack([STEP, STEP.T]))
PRIOR = ChainPrior(3)
CONTEXT = 16


def tokenizer(bos: bool = False) -> PreTrainedTokenizerFast:
    """Words with their leading space are tokens, and so is every letter."""
    letters = [*"abcdefghijklmnopqrstuvwxyz ", "<s>", "<unk>"]
    spaced = [word.replace(" ", "Ġ") for word in WORDS]
    vocabulary = {
        token: number for number, token in enumerate(["Ġ", *letters, *spaced, "\N{SNOWMAN}"])
    }
    merges = [("Ġ", "a"), ("Ġ", "b"), ("Ġ", "c")]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if bos:
        from tokenizers.processors import TemplateProcessing

        number = vocabulary["<s>"]
        made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", number)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", unk_token="<unk>")


def network(kind: str, size: int) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=size, n_positions=24, n_embd=16, n_layer=1, n_head=2, eos_token_id=None
        )
        return GPT2LMHeadModel(config).eval()
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 that knows nothing, with a tokenizer that begins no text by itself."""
    path = tmp_path_factory.mktemp("models") / "gpt2"
    tokens = tokenizer()
    network("gpt2", len(tokens)).save_pretrained(path)
    tokens.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama trained on sequences of both chains until it is clear that it remembers them."""
    path = tmp_path_factory.mktemp("models") / "llama"
    tokens = tokenizer()
    model = network("llama", len(tokens))
    numbers = torch.tensor([tokens.encode(word)[0] for word in WORDS[:3]])
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for chunk in range(12):
        states = np.array(CHAINS.sample(jax.random.key(chunk), 32 * 50, CONTEXT + 1)[0])
        for batch in numbers[torch.from_numpy(states).long()].split(32):
            loss = model(input_ids=batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        reader = LanguageModel(model, numbers.tolist(), None)
        found = score_contexts(
            reader, CHAINS, PRIOR, (CONTEXT,), sequences=128, key=jax.random.key(0)
        ).isel(context=0)
        if found.phase == "M2" and found.clear and found.margin > 0.05:
            break
    else:
        pytest.fail(f"after {50 * 12} steps it is {found.phase.item()}")
    model.save_pretrained(path)
    tokens.save_pretrained(path)
    return path


def test_a_trained_model_has_its_phase_in_every_order(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chains.npz").write_bytes(CHAINS.to_npz())
    given = ["score", str(trained), "--chains", str(tmp_path / "chains.npz")]
    given += ["--contexts", "8", str(CONTEXT), "--sequences", "128"]
    tokens = ["--tokens", *WORDS[:3]]
    options = [*tokens, "--shuffles", "3", "--out", str(tmp_path / "out"), "--json"]
    assert dispatch([*given, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "Hugging Face causal language model"
    assert found["facts"]["architecture"] == "LlamaForCausalLM"
    assert [token.split(" ", 1)[1] for token in found["tokens"]] == ["' a'", "' b'", "' c'"]
    last = found["scores"][-1]
    assert (last["context"], last["phase"], last["clear"]) == (CONTEXT, "M2", True)
    assert [shuffle["phase"] for shuffle in last["shuffles"]] == ["M2"] * 3
    assert last["token_mass"] > 0.95
    assert last["margin"] > 4 * last["margin_error"]
    page = (tmp_path / "out" / "score.html").read_text()
    assert "&#x27; a&#x27;" in page
    assert "Orders of the states" in page

    # Chains that look different in another order are not those that it knows.
    other = ChainSet(np.stack([np.full((3, 3), 0.1) + 0.7 * np.eye(3), np.full((3, 3), 1 / 3)]))
    (tmp_path / "chains.npz").write_bytes(other.to_npz())
    numbers = [token.split()[0] for token in found["tokens"]]
    assert dispatch([*given, "--token-ids", *numbers, "--shuffles", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["scores"][-1]["phase"] != "M2"
    assert "shuffles" not in found["scores"][-1]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("bos", [None, 3])
def test_predictions_are_those_of_the_whole_vocabulary_restricted(
    kind: str, bos: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network(kind, 32)
    chosen = [7, 20, 11]
    states = np.random.default_rng(0).integers(0, 3, (5, 6))
    reader = LanguageModel(model, chosen, bos)
    found = reader(states)
    masses = []
    for sequence, log_probs in zip(states, found, strict=True):
        begin = [] if bos is None else [bos]
        for n in range(6):  # one prefix after another: nothing later is seen
            tokens = torch.tensor([begin + [chosen[s] for s in sequence[: n + 1]]])
            with torch.no_grad():
                p = model(input_ids=tokens).logits[0, -1].double().softmax(-1)[chosen]
            np.testing.assert_allclose(np.exp(log_probs[n]), (p / p.sum()).numpy(), rtol=1e-4)
            masses += [float(p.sum())] * (n >= 3)
    assert reader.masses[6] == [pytest.approx(np.mean(masses), rel=1e-4)]
    monkeypatch.setattr(huggingface, "LOGIT_BYTES", 2 * 4 * 7 * 32)
    np.testing.assert_allclose(LanguageModel(model, chosen, bos)(states), found, atol=1e-5)


def test_batches_keep_the_logits_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network("gpt2", 32)
    sizes = []
    model.register_forward_hook(lambda *call: sizes.append(call[-1].logits.numel() * 4))
    monkeypatch.setattr(huggingface, "LOGIT_BYTES", 10_000)
    LanguageModel(model, [1, 2], None)(np.zeros((40, 8), int))
    assert max(sizes) <= 10_000
    assert len(sizes) > 1


def test_the_token_before_the_first_state(untrained: Path, tmp_path: Path) -> None:
    number = tokenizer().bos_token_id
    firsts = {
        bos: open_language_model(untrained, WORDS[:3], bos=bos).model.bos
        for bos in ("tokenizer", "always", "never")
    }
    assert firsts == {"tokenizer": None, "always": number, "never": None}
    tokens = tokenizer(bos=True)
    network("gpt2", len(tokens)).save_pretrained(tmp_path)
    tokens.save_pretrained(tmp_path)
    found = open_language_model(tmp_path, WORDS[:3])
    assert found.model.bos == number
    assert found.context == 23
    assert found.facts["token before the first state"] == f"{number} '<s>'"
    assert open_language_model(tmp_path, WORDS[:3], bos="never").context == 24


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": [" a", " xyz"]}, "' xyz': expected exactly one token .*, got 'Ġ', 'x', 'y'"),
        ({"tokens": [" a", ""]}, "'': expected exactly one token of the tokenizer, got none"),
        ({"tokens": [" a", "\N{EURO SIGN}"]}, "expected exactly one token|does not know it"),
        ({"tokens": [" a", " b", " a"]}, "' a' is given twice"),
        ({"tokens": [" a"]}, "expected at least 2, one for each state"),
        ({"token_ids": [1, 99]}, "token 99: expected a number from 0 to"),
        ({"token_ids": [1, -1]}, "token -1: expected a number from 0 to"),
        ({"token_ids": [1, 2, 1]}, "token 1 is given twice"),
        ({}, "give --tokens or --token-ids"),
        ({"tokens": [" a"], "token_ids": [1]}, "give --tokens or --token-ids"),
    ],
)
def test_tokens_that_cannot_stand_for_states_are_refused(
    untrained: Path, options: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        open_language_model(untrained, **options)


def test_folders_without_a_model_are_refused(
    untrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be loaded as a causal language model"):
        open_language_model(tmp_path, token_ids=[1, 2])
    (tmp_path / "config.json").write_text((untrained / "config.json").read_text())
    torch.save(network("gpt2", 32).state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot be loaded"):  # a pickle is not opened
        open_language_model(tmp_path, token_ids=[1, 2])
    network("gpt2", 32).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no tokenizer: give --token-ids"):
        open_language_model(tmp_path, WORDS[:2])
    assert open_language_model(tmp_path, token_ids=[1, 2]).tokens == ("1", "2")
    model = network("gpt2", 32)
    model.config.bos_token_id = None
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the model has no beginning-of-sequence token"):
        open_language_model(tmp_path, token_ids=[1, 2], bos="always")
    given = [str(untrained), "--tokens", *WORDS[:3], "--contexts", "25"]
    assert dispatch(["score", *given]) == 2
    assert "the model takes at most 24 states, got 25" in capsys.readouterr().err


def formula(states: torch.Tensor) -> torch.Tensor:
    """2-Gen in PyTorch."""
    follows = torch.eye(3)[states[:, :-1]][..., None] * torch.eye(3)[states[:, 1:]][:, :, None]
    counts = torch.cat([torch.zeros(len(states), 1, 3, 3), follows.cumsum(1)], 1) + 1
    here = counts.gather(2, states[..., None, None].expand(-1, -1, 1, 3))[:, :, 0]
    return (here / here.sum(-1, keepdim=True)).log()


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_models_in_pytorch_are_scored_with_their_gradients(kind: torch.dtype) -> None:
    one = torch.ones((), dtype=torch.float32, requires_grad=True)

    def model(states: np.ndarray) -> torch.Tensor:
        return (one * formula(torch.from_numpy(states))).to(kind)

    assert model(np.zeros((1, 2), int)).requires_grad
    found = score_contexts(
        model, CHAINS, PRIOR, (CONTEXT,), sequences=128, key=jax.random.key(0)
    ).isel(context=0)
    assert found.phase_ood == "G2"
    assert found.distance.sel(set="ood", predictor="2-Gen") == pytest.approx(0, abs=1e-4)


def test_what_is_wrong_with_a_tensor_is_named() -> None:
    for model, message in (
        (lambda s: formula(torch.from_numpy(s)).exp(), "these are probabilities"),
        (lambda s: formula(torch.from_numpy(s)).half() + 1, "if these are logits"),
        (lambda s: torch.from_numpy(s), "floating-point numbers, got Tensor of int64"),
        (lambda s: formula(torch.from_numpy(s)).to("meta"), "expected an array, got Tensor"),
        (lambda s: torch.nn.Linear(3, 3)(s), "the model failed, .*TypeError"),
    ):
        with pytest.raises(ValueError, match=message):
            score_contexts(model, CHAINS, PRIOR, (CONTEXT,), sequences=128, key=jax.random.key(0))
