"""Corpora of text and Semantic IDs side by side: for grounding (GTI, CPT), and tasks beside next-item (LC-Rec).

Shapes: N items · S tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from sidgraft.objectives import HISTORY_TASKS
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
# How LC-Rec's tasks on histories ask: the next item's title after Semantic IDs, its Semantic ID after titles.
HISTORY_TO_TITLE = ("A user chose these items, in this order: ", "\nWhat is the title of the item that comes next?")
TITLES_TO_SID = ("A user chose these items, in this order:", "\nWhich item comes next?")


def corpus(
    name: str,
    tokenizer: Any,
    catalog: pa.Table,
    histories: list[np.ndarray],
    tokens_NS: np.ndarray,
    *,
    max_length: int,
) -> Sequence[Sample]:
    """The samples of a grounding corpus or of a task by its name (see `sidgraft.objectives`).

    ``histories`` are the training parts, as rows of the catalog; ``tokens_NS`` the items' tokens with delimiters.
    """
    if name == "cpt":
        return cpt_corpus(tokenizer, catalog, histories, tokens_NS, max_length=max_length)
    if name in HISTORY_TASKS:
        return history_task(name, tokenizer, catalog, histories, tokens_NS, max_length=max_length)
    return gti_corpus(
        tokenizer,
        catalog,
        tokens_NS,
        text_to_sid=name != "gti-sid-to-text",
        sid_to_text=name != "gti-text-to-sid",
        max_length=max_length,
    )


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
    named = zip(titles_of(catalog), paths, strict=True)
    texts = _texts(encode, [f" {title} | {path}\n" if path else f" {title}\n" for title, path in named])
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


def history_task(
    name: str,
    tokenizer: Any,
    catalog: pa.Table,
    histories: list[np.ndarray],
    tokens_NS: np.ndarray,
    *,
    max_length: int,
) -> Sequence[Sample]:
    """LC-Rec's fused tasks (arXiv 2311.09049, section 3.3): a sample for every item of a history but the first.

    ``history-to-title``: the Semantic IDs before it, and its title as the answer. ``titles-to-sid``: their titles,
    and its Semantic ID. The answer is the target of the loss; the oldest items are cut where the sequence would
    grow longer than ``max_length``. Samples are made when they are asked for: all of them at once are long.
    Raises ValueError when ``max_length`` does not hold the answer and an item before it.
    """
    before, between, _ = chat_pieces(tokenizer, system=None)
    encode = plain_text_encoder(tokenizer)
    titles = titles_of(catalog)
    if name == "history-to-title":
        asked, answers = list(tokens_NS), _texts(encode, titles)
    else:
        asked, answers = _texts(encode, [f"\n- {title}" for title in titles]), list(tokens_NS)
    ahead, behind = map(np.asarray, encode(list(HISTORY_TO_TITLE if name == "history-to-title" else TITLES_TO_SID)))
    fixed = len(before) + len(ahead) + len(behind) + len(between)
    needed = fixed + max(map(len, asked)) + max(map(len, answers))
    if needed > max_length:
        raise ValueError(f"max_length is {max_length}, but the task {name} needs at least {needed}: raise it.")

    def sample(history: np.ndarray, position: int) -> Sample:
        answer = answers[history[position]]
        pieces = [asked[item] for item in history[:position]]
        lengths = np.cumsum([len(piece) for piece in reversed(pieces)])
        kept = int(np.searchsorted(lengths, max_length - fixed - len(answer), side="right"))
        ids_S = np.concatenate([before, ahead, *pieces[len(pieces) - kept :], behind, between, answer])
        return Sample(ids_S, np.arange(len(ids_S)) >= len(ids_S) - len(answer))

    return _Positions(histories, sample)


class _Positions(Sequence[Sample]):
    """A sample for every position of every history but the first, made on demand."""

    def __init__(self, histories: list[np.ndarray], sample: Callable[[np.ndarray, int], Sample]) -> None:
        self.histories, self.sample = histories, sample
        self.ends = np.cumsum([max(len(history) - 1, 0) for history in histories], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        user = int(np.searchsorted(self.ends, index, side="right"))
        history = self.histories[user]
        return self.sample(history, len(history) - int(self.ends[user] - index))


def titles_of(catalog: pa.Table) -> list[str]:
    """What each item is called: its title, or its text where it has none."""
    columns = (catalog.column(name).to_pylist() for name in ("title", "text"))
    return [title or text for title, text in zip(*columns, strict=True)]


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
