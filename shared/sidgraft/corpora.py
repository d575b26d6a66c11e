"""Corpora for grounding: text and Semantic IDs of the same items side by side (GTI, CPT).

Shapes: N items · S tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from sidgraft.plain_text import plain_text_encoder
from sidgraft.prompts import Sample, chat_pieces

MAX_TEXT_TOKENS = 128  # of one title or description; what is longer says little more and costs much

# How GTI asks, in both directions, by what is known of the item. {} is where text or the Semantic ID stands.
TEXT_TO_SID = {
    "title": "What item is called {title}?",
    "description": "What item is described as {description}?",
    "both": "What item is called {title} and described as {description}?",
}
SID_TO_TEXT = {
    "title": ("What is the title of the item with Semantic ID {sid}?", "{title}"),
    "description": ("What is the description of the item with Semantic ID {sid}?", "{description}"),
    "both": ("What are the title and description of the item with Semantic ID {sid}?", "{title}. {description}"),
}


def gti_corpus(
    tokenizer: Any,
    catalog: pa.Table,
    tokens_NS: np.ndarray,
    *,
    text_to_sid: bool,
    sid_to_text: bool,
    max_length: int,
) -> list[Sample]:
    """Question-and-answer pairs of every item (GTI, section 3): text -> SID, SID -> text, or both.

    ``tokens_NS`` are the items' tokens with delimiters [N, L+3] in catalog order. An item is asked for by title,
    by description, and by both, as far as it has them; an item without a description is described by its brand,
    category path and price. The answer is the target of the loss.
    """
    before, between, _ = chat_pieces(tokenizer, system=None)
    encode = plain_text_encoder(tokenizer)
    titles = _Texts.of(encode, catalog.column("title").to_pylist())
    descriptions = _Texts.of(encode, descriptions_of(catalog))
    fill = _Filler(encode)
    samples = []
    for item in range(len(tokens_NS)):
        slots = {"title": titles, "description": descriptions}
        known = [name for name, texts in slots.items() if len(texts.bare[item])]
        for kind in [*known, "both"] if len(known) == 2 else known:
            pairs = []
            if text_to_sid:
                pairs.append((fill(TEXT_TO_SID[kind], item, slots, tokens_NS), tokens_NS[item]))
            if sid_to_text:
                question, answer = SID_TO_TEXT[kind]
                pairs.append((fill(question, item, slots, tokens_NS), fill(answer, item, slots, tokens_NS)))
            for question, answer in pairs:
                ids_S = np.concatenate([before, question, between, answer])
                answered_S = np.arange(len(ids_S)) >= len(ids_S) - len(answer)
                samples.append(_cut(Sample(ids_S, answered_S), max_length))
    return samples


def cpt_corpus(
    tokenizer: Any,
    catalog: pa.Table,
    histories: list[np.ndarray],
    tokens_NS: np.ndarray,
    *,
    max_length: int,
) -> list[Sample]:
    """Histories as running text: each item's SID, its title and category path (Centroid, section 4.3).

    ``histories`` hold rows of the catalog. Every token but the first is a target. A history longer than
    ``max_length`` is continued in a further sequence, cut between items.
    """
    encode = plain_text_encoder(tokenizer)
    paths = [" > ".join(path) if path else "" for path in catalog.column("category").to_pylist()]
    titles = [
        title or text for title, text in zip(*(catalog.column(c).to_pylist() for c in ("title", "text")), strict=True)
    ]
    texts = _texts(
        encode, [f" {title} | {path}\n" if path else f" {title}\n" for title, path in zip(titles, paths, strict=True)]
    )
    pieces = [np.concatenate([tokens_NS[i], text]) for i, text in enumerate(texts)]
    samples = []
    for history in histories:
        parts: list[np.ndarray] = []
        for item in history:
            if parts and sum(map(len, parts)) + len(pieces[item]) > max_length:
                samples.append(_running(parts))
                parts = []
            parts.append(pieces[item])
        if parts:
            samples.append(_running(parts))
    return [_cut(sample, max_length) for sample in samples]


def descriptions_of(catalog: pa.Table) -> list[str]:
    """What describes each item besides its title: its description, or else its brand, category path and price."""
    columns = (catalog.column(c).to_pylist() for c in ("description", "brand", "category", "price"))
    described = []
    for description, brand, path, price in zip(*columns, strict=True):
        known = [brand, " > ".join(path) if path else None, f"price {price:g}" if price is not None else None]
        described.append(description or ", ".join(part for part in known if part))
    return described


def _texts(encode: Callable[[list[str]], list[list[int]]], texts: Sequence[str | None]) -> list[np.ndarray]:
    encoded = encode([text or "" for text in texts])
    return [np.asarray(ids[:MAX_TEXT_TOKENS], dtype=np.int64) for ids in encoded]


@dataclass(frozen=True)
class _Texts:
    """One text an item, as it begins an answer and as it stands behind a space.

    Tokenizers join a space to the word behind it, so a text in the middle of a sentence begins with other tokens.
    """

    bare: list[np.ndarray]
    spaced: list[np.ndarray]

    @staticmethod
    def of(encode: Callable[[list[str]], list[list[int]]], texts: Sequence[str | None]) -> _Texts:
        return _Texts(_texts(encode, texts), _texts(encode, [f" {text}" if text else None for text in texts]))


class _Filler:
    """Fills the slots of a template with token ids; the words around them are tokenized once."""

    def __init__(self, encode: Callable[[list[str]], list[list[int]]]) -> None:
        self.encode = encode
        self.words: dict[str, np.ndarray] = {}

    def __call__(self, template: str, item: int, slots: dict[str, _Texts], tokens_NS: np.ndarray) -> np.ndarray:
        pieces = template.replace("}", "{").split("{")  # words, slot, words, slot, …, words
        parts = []
        for words, slot in zip(pieces[::2], [*pieces[1::2], None], strict=True):
            joined = slot in slots and words.endswith(" ")
            parts.append(self._tokens(words.removesuffix(" ") if joined else words))
            if slot == "sid":
                parts.append(tokens_NS[item])
            elif slot is not None:
                parts.append((slots[slot].spaced if joined else slots[slot].bare)[item])
        return np.concatenate(parts)

    def _tokens(self, words: str) -> np.ndarray:
        if words not in self.words:
            self.words[words] = np.asarray(self.encode([words])[0], dtype=np.int64)
        return self.words[words]


def _running(parts: list[np.ndarray]) -> Sample:
    ids_S = np.concatenate(parts)
    return Sample(ids_S, np.arange(len(ids_S)) >= 1)


def _cut(sample: Sample, max_length: int) -> Sample:
    return Sample(sample.ids_S[:max_length], sample.target_S[:max_length])
