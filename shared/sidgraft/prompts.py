"""Token sequences for the language model: chat turns around Semantic IDs and plain text.

The fixed pieces of a chat come from the model's own template and are tokenized once, control tokens included.
What stands between them are token ids: Semantic IDs, or item text, which never becomes a control token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sidgraft.plain_text import plain_text_encoder
from sidgraft.sids import SidVocabulary

MARK = "\ue0f0"  # stands for a turn's content while the template is rendered; no template strips it

NEXT_ITEM_SYSTEM = "Predict the next item that the user will choose."
QUERY_SYSTEM = "Find the item that fits the query."


@dataclass(frozen=True)
class Sample:
    """One sequence for training: token ids, and which of them are targets of the loss (never the first)."""

    ids_S: np.ndarray
    target_S: np.ndarray

    def __len__(self) -> int:
        return len(self.ids_S)


def chat_pieces(tokenizer: Any, *, system: str | None) -> list[np.ndarray]:
    """The fixed token ids before the user's content, between it and the assistant's, and after that.

    Rendered by the tokenizer's chat template (with the empty think block where it has one); a tokenizer without
    a template gets plain "User:" and "Assistant:" lines. Raises ValueError when the template drops a turn.
    """
    messages = [{"role": "user", "content": MARK}, {"role": "assistant", "content": MARK}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    if tokenizer.chat_template is None:
        text = f"{system + chr(10) if system else ''}User: {MARK}\nAssistant: {MARK}{tokenizer.eos_token or chr(10)}"
    else:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    pieces = text.split(MARK)
    if len(pieces) != 3:
        raise ValueError(
            f"the chat template renders a user and an assistant turn with {len(pieces) - 1} contents, expected 2:"
            " give a base model whose template keeps both turns."
        )
    return [np.asarray(tokenizer(piece, add_special_tokens=False).input_ids, dtype=np.int64) for piece in pieces]


class NextItem:
    """Histories as chat: the user turn holds the items so far, the assistant turn the next one, all as SIDs."""

    def __init__(self, tokenizer: Any, vocabulary: SidVocabulary, max_length: int) -> None:
        self.before, self.between, self.after = chat_pieces(tokenizer, system=NEXT_ITEM_SYSTEM)
        self.begin = np.asarray([vocabulary.begin_id])
        fixed = len(self.before) + len(self.between) + len(self.after)
        self.item_tokens = vocabulary.levels + 2
        self.most_items = (max_length - fixed) // self.item_tokens
        if self.most_items < 2:
            raise ValueError(
                f"max_length is {max_length}, but the template takes {fixed} tokens and an item {self.item_tokens}:"
                f" give at least {fixed + 2 * self.item_tokens}."
            )

    def sample(self, items_NS: np.ndarray) -> Sample:
        """A training sequence of items [n, L+3] in time order; the last one is the assistant's.

        Every token from the user turn's content onward is a target, so one sequence supervises every item. The
        oldest items are cut when the sequence would grow longer than max_length.
        """
        items_NS = items_NS[-self.most_items :]
        ids_S = np.concatenate([self.before, items_NS[:-1].ravel(), self.between, items_NS[-1], self.after])
        target_S = np.arange(len(ids_S)) >= max(len(self.before), 1)
        return Sample(ids_S, target_S)

    def prompt(self, items_NS: np.ndarray) -> np.ndarray:
        """The prompt for the item after ``items_NS`` [n, L+3]: it ends with the begin delimiter."""
        items_NS = items_NS[len(items_NS) - min(len(items_NS), self.most_items - 1) :]
        return np.concatenate([self.before, items_NS.ravel(), self.between, self.begin])


class QueryItem:
    """A query as chat: the user turn holds its named fields as text, the assistant turn an item that fits, as a SID."""

    def __init__(self, tokenizer: Any, vocabulary: SidVocabulary, max_length: int) -> None:
        self.before, self.between, self.after = chat_pieces(tokenizer, system=QUERY_SYSTEM)
        self.encode = plain_text_encoder(tokenizer)
        self.begin = np.asarray([vocabulary.begin_id])
        item_tokens = vocabulary.levels + 2
        self.most_text = max_length - len(self.before) - len(self.between) - len(self.after) - item_tokens
        if self.most_text < 1:
            raise ValueError(
                f"max_length is {max_length}, but the template and an item take {max_length - self.most_text} tokens:"
                " leave room for the query."
            )

    def texts(self, prompts: list[str]) -> list[np.ndarray]:
        """Token ids of queries; what is too long for max_length loses its end."""
        return [np.asarray(ids[: self.most_text], dtype=np.int64) for ids in self.encode(prompts)]

    def sample(self, text_T: np.ndarray, item_S: np.ndarray) -> Sample:
        """A training sequence of a query and one item's tokens [L+3]; the assistant turn is the target."""
        ids_S = np.concatenate([self.before, text_T, self.between, item_S, self.after])
        return Sample(ids_S, np.arange(len(ids_S)) >= len(ids_S) - len(item_S) - len(self.after))

    def prompt(self, text_T: np.ndarray) -> np.ndarray:
        """The prompt for the items that fit: it ends with the begin delimiter."""
        return np.concatenate([self.before, text_T, self.between, self.begin])
