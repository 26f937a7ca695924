"""Causal language models in the format of Hugging Face's transformers, from a folder.

C tokens of the vocabulary stand for the states.  A sequence of states becomes one of tokens, after
the beginning-of-sequence token where that is wanted, and what the model says of the next token is
restricted to the C tokens and divided by the probability that they have together, their *mass*.

PyTorch and transformers are imported when a model is opened; nothing is ever downloaded.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xarray as xr

from iclens.interop.sources import Source

Bos = Literal["tokenizer", "always", "never"]
"""When the beginning-of-sequence token goes first: where the tokenizer itself puts it, or not."""

LOGIT_BYTES = 2**27
"""Bytes of the logits of a batch, in float32; a few times as much is in memory."""


class LanguageModel:
    """A causal language model as a function states -> log-probabilities of C of its tokens."""

    def __init__(self, network: Any, tokens: Sequence[int], bos: int | None):
        self.network, self.tokens, self.bos = network, list(tokens), bos
        self.masses: defaultdict[int, list[float]] = defaultdict(list)
        """By context length the mass of the tokens, a mean over late positions, in each call."""

    def __call__(self, states: np.ndarray) -> np.ndarray:
        """Log-probabilities (batch, position, state) in float32, in batches of bounded memory."""
        import torch

        count, length = states.shape
        tokens = torch.tensor(self.tokens)[torch.as_tensor(states)]
        if self.bos is not None:
            tokens = torch.cat([torch.full((count, 1), self.bos), tokens], dim=1)
        each = 4 * tokens.shape[1] * vocabulary(self.network)
        restricted, mass = [], 0.0
        for batch in tokens.split(max(1, LOGIT_BYTES // each)):
            batch = batch.to(self.network.device)
            with torch.inference_mode():
                logits = self.network(
                    input_ids=batch, attention_mask=torch.ones_like(batch), use_cache=False
                ).logits[:, -length:]
                logits = logits.float()
                chosen = logits[..., self.tokens] - logits.logsumexp(-1, keepdim=True)
            mass += float(chosen[:, length // 2 :].exp().sum(-1).mean(1).sum())
            restricted.append(chosen.log_softmax(-1).cpu().numpy())
        self.masses[length].append(mass / count)
        return np.concatenate(restricted)

    def add_mass(self, scores: xr.Dataset) -> xr.Dataset:
        """Scores of this model with `token_mass` over context, and its spread over calls."""
        calls = [self.masses[int(context)] for context in scores.context]
        return scores.assign(
            token_mass=("context", [np.mean(call) for call in calls], {"units": "1"}),
            token_mass_spread=("context", [np.std(call) for call in calls], {"units": "1"}),
        )


def vocabulary(network: Any) -> int:
    """Number of tokens that a model predicts."""
    return int(network.get_output_embeddings().weight.shape[0])


def open_language_model(
    folder: str | Path,
    tokens: Sequence[str] = (),
    token_ids: Sequence[int] = (),
    bos: Bos = "tokenizer",
) -> Source:
    """The causal language model in a folder, and C of its tokens, by text or by number.

    Raises `ValueError` if torch or transformers are not installed, if the folder has no such model
    or its weights are no safetensors, if a text is not exactly one token of its tokenizer, if a
    token is not in the vocabulary or given twice, or if there is no token to begin with where one
    is always wanted.
    """
    if bool(tokens) == bool(token_ids):
        raise ValueError(
            "a language model needs tokens that stand for the states: give --tokens or --token-ids"
        )
    network, tokenizer = _load(Path(folder))
    chosen = [_token(tokenizer, text, folder) for text in tokens] or list(token_ids)
    _check_tokens(chosen, [repr(text) for text in tokens], vocabulary(network))
    texts = [repr(text) for text in tokens]
    if not texts:
        texts = ["" if tokenizer is None else repr(tokenizer.decode([t])) for t in chosen]
    labels = [f"{number} {text}".strip() for number, text in zip(chosen, texts, strict=True)]
    first = _first_token(network, tokenizer, bos, chosen[0])
    config = network.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    begins = "none"
    if first is not None:
        name = "" if tokenizer is None else f" {tokenizer.convert_ids_to_tokens(first)!r}"
        begins = f"{first}{name}"
    facts = {
        "architecture": type(network).__name__,
        "precision": str(network.dtype).removeprefix("torch."),
        "token before the first state": begins,
    }
    return Source(
        LanguageModel(network, chosen, first),
        "Hugging Face causal language model",
        facts,
        tuple(labels),
        states=len(chosen),
        context=None if longest is None else longest - (first is not None),
    )


def _load(folder: Path) -> tuple[Any, Any]:
    """The model, and its tokenizer if there is one in the folder."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # also what only looks for a newer version asks nobody
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise ValueError(
            f"a language model needs torch and transformers ({error}): install the extra interop"
        ) from None
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        network = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", use_safetensors=True, **options
        )
        described = any((folder / name).is_file() for name in TOKENIZER_FILES)
        tokenizer = AutoTokenizer.from_pretrained(folder, **options) if described else None
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"{folder}: cannot be loaded as a causal language model: "
            f"{type(error).__name__}: {reason}"
        ) from error
    finally:
        if bars:
            logging.enable_progress_bar()
    network.eval()
    return network.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def _token(tokenizer: Any, text: str, folder: str | Path) -> int:
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer: give --token-ids instead of --tokens")
    pieces = tokenizer.encode(text, add_special_tokens=False)
    if len(pieces) != 1:
        shown = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(pieces))) or "none"
        raise ValueError(
            f"token {text!r}: expected exactly one token of the tokenizer, got {shown}"
        )
    if pieces[0] == tokenizer.unk_token_id:
        raise ValueError(f"token {text!r}: the tokenizer does not know it")
    return int(pieces[0])


def _check_tokens(chosen: list[int], texts: list[str], size: int) -> None:
    names = texts or list(map(str, chosen))
    if len(chosen) < 2:
        raise ValueError(f"tokens: expected at least 2, one for each state, got {names[0]} alone")
    for place, token in enumerate(chosen):
        if not 0 <= token < size:
            raise ValueError(f"token {names[place]}: expected a number from 0 to {size - 1}")
        if token in chosen[:place]:
            other = names[chosen.index(token)]
            same = "is given twice" if other == names[place] else f"is the same as {other}"
            raise ValueError(f"token {names[place]} {same}: each state needs a token of its own")


def _first_token(network: Any, tokenizer: Any, bos: Bos, example: int) -> int | None:
    """The token that goes before the states, if any."""
    if bos == "never":
        return None
    own = None if tokenizer is None else tokenizer.bos_token_id
    if bos == "always":
        own = network.config.get_text_config().bos_token_id if own is None else own
        if own is None:
            raise ValueError("--bos always: the model has no beginning-of-sequence token")
        return int(own)
    if own is None:
        return None
    begun = tokenizer.encode(tokenizer.decode([example]))
    return int(own) if begun[:1] == [own] else None
