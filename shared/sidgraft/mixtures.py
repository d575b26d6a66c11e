"""The training set of fine-tuning: every next-item sample once an epoch, and samples of other tasks by weight.

Symbols: n next-item samples · P samples of a task's pool · m drawn of it in an epoch.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset
from transformers import TrainerCallback

from sidgraft.prompts import Sample


class Mixture(Dataset):
    """Samples of one epoch at a time: the ``next_item`` samples, then those drawn of each task.

    Task j with weight w_j (samples per next-item sample) has m_j = round(w_j n) samples in every epoch, at least
    one. Its draws are numbered through: epoch e has the draws e m_j .. (e+1) m_j - 1, and draw t is sample
    sigma_r(t mod P_j) of its pool, where r = floor(t / P_j) and sigma_r is a random order that depends on the seed,
    the task's name and r alone. So a pool is passed through whole before any of it comes again, no epoch repeats
    the last one's part, and an epoch can be made again from its number: a resumed run needs no state.

    The first ``grounding_epochs`` epochs hold samples of ``grounding`` alone, drawn in the same way, as many as a
    later epoch has: the Trainer's epochs are all of one length. The others are counted from 0 after them.
    """

    def __init__(
        self,
        next_item: Sequence[Sample],
        tasks: Mapping[str, tuple[Sequence[Sample], float]],
        *,
        grounding: Sequence[Sample] = (),
        grounding_epochs: int = 0,
        seed: int,
    ) -> None:
        self.seed = seed
        self.next_item = next_item
        self.grounding, self.grounding_epochs = grounding, grounding_epochs
        self.pools = {name: pool for name, (pool, _) in tasks.items()}
        self.counts = {name: max(round(weight * len(next_item)), 1) for name, (_, weight) in tasks.items()}
        empty = [name for name, pool in self.pools.items() if not len(pool)]
        if empty:
            raise ValueError(f"the data hold no sample for {', '.join(empty)}: leave it out of tasks.")
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the samples of this epoch, counted from 0, grounding epochs included."""
        if epoch < self.grounding_epochs:
            self.parts = [(self.grounding, self._drawn("grounding", self.grounding, epoch, len(self)))]
        else:
            epoch -= self.grounding_epochs
            self.parts = [(self.next_item, np.arange(len(self.next_item)))]
            for name, pool in self.pools.items():
                self.parts.append((pool, self._drawn(name, pool, epoch, self.counts[name])))
        self.ends = np.cumsum([len(drawn) for _, drawn in self.parts])

    def _drawn(self, name: str, pool: Sequence[Sample], epoch: int, count: int) -> np.ndarray:
        return draws(len(pool), epoch * count, count, [self.seed, zlib.crc32(name.encode())])

    def __len__(self) -> int:
        return len(self.next_item) + sum(self.counts.values())

    def __getitem__(self, index: int) -> Sample:
        part = int(np.searchsorted(self.ends, index, side="right"))
        pool, drawn = self.parts[part]
        return pool[int(drawn[index - self.ends[part]])]  # counted from the part's end


def draws(size: int, first: int, count: int, seed: list[int]) -> np.ndarray:
    """Numbers ``first`` .. ``first + count - 1`` of an endless walk through random orders of ``size`` things."""
    rounds = range(first // size, (first + count - 1) // size + 1)
    walk = np.concatenate([np.random.default_rng([*seed, r]).permutation(size) for r in rounds])
    return walk[first - rounds.start * size :][:count]


class FollowEpochs(TrainerCallback):
    """Tells a mixture which epoch the Trainer begins, or goes on with after a checkpoint."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.mixture.set_epoch(int(state.epoch or 0))
