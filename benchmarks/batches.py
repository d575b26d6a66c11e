"""Batches as the peers' users make them."""

from __future__ import annotations

import torch

from sidgraft.prompts import Sample


def padded(group: list[Sample]) -> dict[str, torch.Tensor]:
    """A padded batch with labels, as the usual collators make it."""
    longest = max(len(s) for s in group)
    ids_BS = torch.zeros(len(group), longest, dtype=torch.long)
    mask_BS = torch.zeros_like(ids_BS)
    labels_BS = torch.full_like(ids_BS, -100)
    for row, sample in enumerate(group):
        ids = torch.from_numpy(sample.ids_S)
        ids_BS[row, : len(ids)] = ids
        mask_BS[row, : len(ids)] = 1
        labels_BS[row, : len(ids)] = torch.where(torch.from_numpy(sample.target_S), ids, -100)
    return {"input_ids": ids_BS, "attention_mask": mask_BS, "labels": labels_BS}
