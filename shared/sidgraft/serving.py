"""Recommend from a model and its Semantic IDs for histories of item ids, as a service does it.

Items that are unknown to the model are skipped in histories; items that are no longer offered are not in the trie,
so no beam can reach them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sidgraft.artifacts import Artifact
from sidgraft.attention import use_packed_attention
from sidgraft.beam import decode
from sidgraft.models import load_model
from sidgraft.prompts import NextItem
from sidgraft.sids import SidVocabulary, codes_array
from sidgraft.trie import Trie, build_trie


@dataclass(frozen=True)
class Recommended:
    """For each history: item ids, best first, and their log-probabilities; and how many history items were unknown."""

    item_ids: list[list[str]]
    scores: list[list[float]]
    unknown: int


@dataclass(frozen=True)
class Recommender:
    """A loaded model that recommends items which are offered."""

    model: Any
    vocabulary: SidVocabulary
    prompts: NextItem
    trie: Trie
    tokens_NS: np.ndarray  # of all items the model knows
    row_of: dict[str, int]
    offered: list[str]  # item ids in the order of the trie's items
    place_N: np.ndarray  # of each row that the model knows, the place in that order; -1 where it is not offered

    @staticmethod
    def load(
        model: Artifact, semantic_ids: Artifact, dtype: torch.dtype, *, offered: Collection[str] | None = None
    ) -> Recommender:
        """Load a model; ``offered`` are the items that may be recommended, all that it knows where it is None.

        Raises ValueError when the model knows none of them.
        """
        items = semantic_ids.read_table("semantic_ids.parquet")
        item_ids, codes_NL = items["item_id"].to_pylist(), codes_array(items)
        kept = [row for row, item in enumerate(item_ids) if offered is None or item in offered]
        if not kept:
            raise ValueError(
                f"none of the {len(item_ids)} items that the model knows is offered: give the catalog (or list of"
                " delisted items) that belongs to this bundle, or train on the new catalog."
            )
        place_N = np.full(len(item_ids), -1)
        place_N[kept] = np.arange(len(kept))
        language_model, tokenizer, vocabulary = load_model(model, dtype)
        language_model.eval()
        use_packed_attention(language_model)
        return Recommender(
            language_model,
            vocabulary,
            NextItem(tokenizer, vocabulary, int(model.arguments["max_length"])),
            build_trie(codes_NL[kept]).to(language_model.device),  # once, not with every block of users
            vocabulary.item_tokens(codes_NL),
            {item: row for row, item in enumerate(item_ids)},
            [item_ids[row] for row in kept],
            place_N,
        )

    def recommend(
        self,
        histories: Sequence[Sequence[str]],
        *,
        items: int,
        beams: int,
        score: str = "exact",
        exclude_history: bool = False,
        batch_tokens: int = 8192,
    ) -> Recommended:
        """The best ``items`` items for each history (oldest item first), found with ``beams`` beams.

        With ``exclude_history`` each search does without the items of its own history.
        """
        rows = [
            np.array([self.row_of[item] for item in history if item in self.row_of], np.int64) for history in histories
        ]
        places = [self.place_N[history] for history in rows]
        found = decode(
            self.model,
            self.trie,
            self.vocabulary,
            [self.prompts.prompt(self.tokens_NS[history]) for history in rows],
            beams=beams,
            score=score,
            batch_tokens=batch_tokens,
            excluded=[some[some >= 0] for some in places] if exclude_history else None,
            what="recommend",
        )
        best = zip(found.items_UG[:, :items], found.scores_UG[:, :items], strict=True)
        chosen = [(row[row >= 0], scores[row >= 0]) for row, scores in best]
        return Recommended(
            [[self.offered[place] for place in row] for row, _ in chosen],
            [scores.tolist() for _, scores in chosen],
            sum(map(len, histories)) - sum(map(len, rows)),
        )
