"""Vectors that may be larger than memory: read in batches, as often as it takes.

Shapes: N vectors · D their width · B vectors of a batch · S vectors of a sample.

A vector's row is its number in an order such as that of item_id, wherever it stands in a file. What is drawn, kept and
summed by row is then the same for any order of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from sidgraft import kmeans

Batches = Iterator[tuple[np.ndarray, np.ndarray]]


def _as_it_is(vectors_BD: np.ndarray) -> np.ndarray:
    return vectors_BD


@dataclass(frozen=True)
class Vectors:
    """N vectors of one width. ``read`` starts a pass over them: rows [B], each once and in any order, and vectors."""

    items: int
    width: int
    read: Callable[[], Batches]
    change: Callable[[np.ndarray], np.ndarray] = _as_it_is

    def changed(self, change: Callable[[np.ndarray], np.ndarray], width: int) -> Vectors:
        """The same vectors, each batch [B, D] made [B, ``width``] by ``change`` when it is read."""
        return Vectors(self.items, width, self.batches, change)

    def batches(self) -> Batches:
        """A pass over all vectors: their rows [B], and float32 vectors [B, D] that nobody may write to."""
        for rows_B, vectors_BD in self.read():
            yield rows_B, self.change(vectors_BD)

    def take(self, rows_S: np.ndarray) -> np.ndarray:
        """The vectors of these distinct rows, float32 [S, D], in the order of ``rows_S``: one pass."""
        places_N = np.full(self.items, -1)
        places_N[rows_S] = np.arange(len(rows_S))
        taken_SD = np.empty((len(rows_S), self.width), np.float32)
        for rows_B, vectors_BD in self.read():
            places_B = places_N[rows_B]
            wanted_B = places_B >= 0
            if wanted_B.any():
                taken_SD[places_B[wanted_B]] = self.change(vectors_BD[wanted_B])
        return taken_SD


def in_memory(vectors_ND: np.ndarray) -> Vectors:
    """A matrix whose rows are in their order already."""
    rows_N = np.arange(len(vectors_ND))

    def read() -> Batches:
        for chunk in kmeans.chunks(*vectors_ND.shape):
            yield rows_N[chunk], vectors_ND[chunk].astype(np.float32, copy=False)

    return Vectors(len(vectors_ND), vectors_ND.shape[1], read)


def sample_rows(items: int, most: int, *seed: int) -> np.ndarray:
    """At most ``most`` of so many rows, in order, drawn by the seed; further numbers tell several samples apart."""
    return np.sort(np.random.default_rng(seed).permutation(items)[:most])
