"""Semantic IDs as tokens: the token of each code, the vocabulary's file, and items as token sequences.

Shapes: N items · L semantic levels, so L + 1 codes an item with the deduplication code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import pyarrow as pa

BEGIN, END = "<|sid_begin|>", "<|sid_end|>"
FILE = "sid_vocabulary.json"


def token_text(level: int, code: int) -> str:
    """The token of a code: level 0, code 7 is ``<s_a_7>``."""
    return f"<s_{ascii_lowercase[level]}_{code}>"


def token_texts(sizes: list[int]) -> list[str]:
    """All new tokens in id order: level by level, the deduplication level last, then the two delimiters.

    ``sizes`` are the codes of each level, deduplication included.
    """
    if len(sizes) > len(ascii_lowercase):
        raise ValueError(f"{len(sizes)} levels, at most {len(ascii_lowercase)} have a letter: use fewer levels.")
    return [token_text(level, code) for level, size in enumerate(sizes) for code in range(size)] + [BEGIN, END]


@dataclass(frozen=True)
class SidVocabulary:
    """The new tokens and their ids. Ids are consecutive, from ``first_id``, in the order of `token_texts`."""

    sizes: tuple[int, ...]
    first_id: int

    @property
    def levels(self) -> int:
        """Levels with the deduplication level: L + 1."""
        return len(self.sizes)

    @property
    def n_new(self) -> int:
        """Number of new tokens: all codes and two delimiters."""
        return sum(self.sizes) + 2

    @property
    def level_first_ids(self) -> list[int]:
        """Token id of code 0 of each level."""
        return [self.first_id + sum(self.sizes[:level]) for level in range(self.levels)]

    @property
    def begin_id(self) -> int:
        """Token id of ``<|sid_begin|>``."""
        return self.first_id + sum(self.sizes)

    @property
    def end_id(self) -> int:
        """Token id of ``<|sid_end|>``."""
        return self.begin_id + 1

    def level_rows(self, level: int) -> slice:
        """Where the rows of a level stand among the new rows [n_new, D]."""
        first = sum(self.sizes[:level])
        return slice(first, first + self.sizes[level])

    def item_tokens(self, codes_NL: np.ndarray) -> np.ndarray:
        """Token ids of items, delimiters included: codes [N, L+1] -> [N, L+3]."""
        ids_NL = codes_NL + np.asarray(self.level_first_ids)
        begin_N, end_N = (np.full((len(codes_NL), 1), i) for i in (self.begin_id, self.end_id))
        return np.concatenate([begin_N, ids_NL, end_N], axis=1)

    def save(self, directory: Path) -> None:
        """Write `sid_vocabulary.json`: token text, id, level and code of every new token."""
        codes = [(level, code) for level, size in enumerate(self.sizes) for code in range(size)]
        texts = token_texts(list(self.sizes))
        tokens = [
            {"token": text, "id": self.first_id + i, "level": level, "code": code}
            for i, (text, (level, code)) in enumerate(zip(texts, [*codes, (None, None), (None, None)], strict=True))
        ]
        value = {"sizes": list(self.sizes), "first_id": self.first_id, "tokens": tokens}
        (directory / FILE).write_text(json.dumps(value, indent=0) + "\n", encoding="utf-8")

    @staticmethod
    def load(directory: Path) -> SidVocabulary:
        """Read `sid_vocabulary.json`."""
        value = json.loads((directory / FILE).read_text(encoding="utf-8"))
        return SidVocabulary(tuple(value["sizes"]), value["first_id"])


def codes_array(semantic_ids: pa.Table) -> np.ndarray:
    """The codes of a semantic_ids table as an array [N, L+1] of int64."""
    column = semantic_ids.column("codes").combine_chunks()
    flat = column.flatten().to_numpy(zero_copy_only=False)
    return flat.reshape(len(column), -1).astype(np.int64)
