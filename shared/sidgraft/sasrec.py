"""SASRec: a small causal transformer over item sequences, the yardstick that a language model has to beat.

Kang and McAuley (2018), "Self-Attentive Sequential Recommendation", with the one change that makes it strong: the
softmax over all items instead of one sampled negative (Klenitskiy and Vasilev, 2023). Items and output share a matrix.

Shapes: B sequences · T positions · M supervised positions · N items · D width · U users · G recommended items a user.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn

from sidgraft import checks
from sidgraft.losses import chunked_cross_entropy
from sidgraft.metrics import ndcg_at
from sidgraft.progress import Progress, say

NONE = -1  # fills a sequence behind its end; never an item
SCORES_AT_ONCE = 16 * 1024 * 1024


class SASRec(nn.Module):
    """Items [B, T] in, states [B, T, D] out; a state scores item i by its product with row i of ``items.weight``.

    Sequences start at the left and are filled with NONE at the right, so that the causal mask alone keeps what
    fills them out of sight. The states of the filling mean nothing.
    """

    def __init__(self, items: int, *, width: int, layers: int, heads: int, dropout: float, max_length: int) -> None:
        super().__init__()
        self.items = nn.Embedding(items, width)
        self.positions = nn.Embedding(max_length, width)
        nn.init.normal_(self.items.weight, std=width**-0.5)
        nn.init.normal_(self.positions.weight, std=width**-0.5)
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        for weight in self.blocks.parameters():  # the layers are copies of one: each starts by itself
            if weight.dim() == 2:
                nn.init.xavier_uniform_(weight)

    def forward(self, items_BT: torch.Tensor) -> torch.Tensor:
        length = items_BT.shape[1]
        # embedding(), not plain indexing: on several threads the gradient of the latter is summed in any order
        states_BTD = nn.functional.embedding(items_BT.clamp(min=0), self.items.weight)
        states_BTD = states_BTD + self.positions.weight[:length]
        mask_TT = nn.Transformer.generate_square_subsequent_mask(length, device=items_BT.device)
        return self.blocks(self.dropout(states_BTD), mask=mask_TT, is_causal=True)


def next_item_loss(model: SASRec, items_BT: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over all items of every item given those before it, a float32 scalar."""
    inputs_BT, targets_BT = items_BT[:, :-1], items_BT[:, 1:]
    states_BTD = model(inputs_BT)
    known_BT = targets_BT != NONE
    return chunked_cross_entropy(states_BTD[known_BT], [model.items.weight], targets_BT[known_BT])


def fit(
    sequences: list[np.ndarray],
    histories: list[np.ndarray],
    target_U: np.ndarray,
    items: int,
    *,
    width: int = 64,
    layers: int = 2,
    heads: int = 2,
    dropout: float = 0.2,
    max_length: int = 50,
    learning_rate: float = 1e-3,
    batch_size: int = 32,
    epochs: int = 100,
    patience: int = 10,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[SASRec, dict[str, Any]]:
    """Train on ``sequences`` (rows of the item table, in time order) and keep the epoch with the best validation.

    Validation is the NDCG@10 of ``target_U`` given ``histories``; training stops after ``patience`` epochs without a
    better one, ties keep the earlier. Without validation targets it runs all epochs and keeps the last. Sequences
    are cut to their last ``max_length`` + 1 items; those of a single item teach nothing and are left out. On a CPU the
    same seed gives the same weights; a GPU adds up gradients of attention in no fixed order. Returns the model and its
    best epoch, its NDCG@10 and its log. Raises ValueError when the loss is no number, at a step or behind the last one
    of an epoch.
    """
    samples = [s[-max_length - 1 :] for s in sequences if len(s) > 1]
    with torch.random.fork_rng(devices=[device] if torch.device(device).type == "cuda" else []):
        torch.manual_seed(seed)
        sizes = {"width": width, "layers": layers, "heads": heads, "dropout": dropout, "max_length": max_length}
        model = SASRec(items, **sizes).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
        best: dict[str, Any] = {"epoch": 0, "ndcg@10": None}
        log: list[dict[str, Any]] = []
        kept = copy.deepcopy(model.state_dict())
        order = np.random.default_rng(seed)
        advice = f"lower sasrec_learning_rate={learning_rate}"
        for epoch in range(1, (epochs if samples else 0) + 1):
            loss = _train_epoch(model, optimizer, samples, order, batch_size, epoch, advice)
            found = {"epoch": epoch, "loss": loss, "ndcg@10": None}
            if len(target_U):
                rank_U = target_ranks(model, histories, target_U)
                found["ndcg@10"] = float(ndcg_at(rank_U, 10).mean())
                say(f"SASRec epoch {epoch}: loss {loss:.3f}, validation NDCG@10 {found['ndcg@10']:.4f}")
            log.append(found)
            if best["ndcg@10"] is None or found["ndcg@10"] > best["ndcg@10"]:
                best = {"epoch": epoch, "ndcg@10": found["ndcg@10"]}
                kept = copy.deepcopy(model.state_dict())
                # the same seed goes the same way again (on a GPU nearly): a later failure does not lose it
                advice = (
                    f"lower sasrec_learning_rate={learning_rate}, or keep the model of epoch {epoch} with"
                    f" sasrec_epochs={epoch}"
                )
            elif epoch - best["epoch"] >= patience:
                break
    model.load_state_dict(kept)
    if best["ndcg@10"] is not None:
        say(f"SASRec: best epoch {best['epoch']} of {len(log)}, validation NDCG@10 {best['ndcg@10']:.4f}")
    return model.eval(), {"best_epoch": best["epoch"], "best_ndcg@10": best["ndcg@10"], "log": log}


def _train_epoch(
    model: SASRec,
    optimizer: torch.optim.Optimizer,
    samples: list[np.ndarray],
    order: np.random.Generator,
    batch_size: int,
    epoch: int,
    advice: str,
) -> float:
    """One pass over the sequences in a new order; returns the mean loss of its steps."""
    model.train()
    shuffled = order.permutation(len(samples))
    losses = []
    at: dict[str, Any] = {"epoch": epoch, "batches": -(-len(samples) // batch_size), "advice": advice}
    with Progress(f"SASRec epoch {epoch}", len(samples), "users") as progress:
        for start in range(0, len(samples), batch_size):
            batch = [samples[i] for i in shuffled[start : start + batch_size]]
            items_BT = padded(batch, model.items.weight.device)
            loss = next_item_loss(model, items_BT)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            checks.finite("the loss of SASRec", losses[-1], batch=len(losses), **at)
            progress.update(len(batch), loss=losses[-1])
    with torch.no_grad():  # the last step is behind its loss, and nothing else would look at what it did
        after = next_item_loss(model.eval(), items_BT).item()
    checks.finite("the loss of SASRec after the step", after, batch=len(losses), **at)
    return float(np.mean(losses))


def padded(sequences: list[np.ndarray], device: torch.device | str = "cpu") -> torch.Tensor:
    """Sequences of items as one int64 tensor [B, T], filled with NONE at the right."""
    tensors = [torch.from_numpy(np.asarray(s, dtype=np.int64)) for s in sequences]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=NONE).to(device)


@torch.no_grad()
def scores(model: SASRec, histories: list[np.ndarray]) -> torch.Tensor:
    """Scores of all items after each history [U, N], on the model's device; zero after an empty history."""
    model.eval()
    most = model.positions.weight.shape[0]
    weight = model.items.weight
    known = [u for u, history in enumerate(histories) if len(history)]
    result = weight.new_zeros(len(histories), len(weight))
    if known:
        cut = [histories[u][-most:] for u in known]
        states_BTD = model(padded(cut, weight.device))
        last_B = torch.tensor([len(history) - 1 for history in cut], device=weight.device)
        result[known] = states_BTD[torch.arange(len(cut), device=weight.device), last_B] @ weight.T
    return result


@torch.no_grad()
def target_ranks(model: SASRec, histories: list[np.ndarray], target_U: np.ndarray) -> np.ndarray:
    """The rank of each target among all items, from 1; items with the same score stand before it."""
    ranks_U = np.zeros(len(histories), dtype=np.int64)
    for chosen in score_batches(histories, len(model.items.weight)):
        scores_UN = scores(model, [histories[u] for u in chosen])
        target = torch.from_numpy(target_U[chosen]).to(scores_UN.device)
        ranks_U[chosen] = (scores_UN >= scores_UN.gather(1, target[:, None])).sum(dim=1).cpu().numpy()
    return ranks_U


def score_batches(histories: list[np.ndarray], items: int) -> list[list[int]]:
    """Groups of users of similar history length whose scores fit into memory at once."""
    at_once = max(1, SCORES_AT_ONCE // max(items, 1))
    order = sorted(range(len(histories)), key=lambda u: (-len(histories[u]), u))
    return [order[start : start + at_once] for start in range(0, len(order), at_once)]
