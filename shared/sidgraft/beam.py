"""Beam search over the trie: prefill each history once, then one step a level for all beams of all histories.

Every beam is an item by construction: a step looks only at the children that the trie has. Sampling settings of
a checkpoint are never read.

Shapes: B histories · G beams · C children · V rows of the output head · D model width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sidgraft.attention import BeamCache, pack_sequences
from sidgraft.devices import suppressing_out_of_memory
from sidgraft.progress import Progress
from sidgraft.sids import SidVocabulary
from sidgraft.trie import Trie

LOGITS_AT_ONCE = 32 * 1024 * 1024  # entries of the full-vocabulary logits held at a time
SCORES = ("exact", "restricted")
SCORES_AT_ONCE = 16 * 1024 * 1024  # entries of the scores of a level's codes, for all beams of a group of prompts


@dataclass(frozen=True)
class Beams:
    """What a search found, best first."""

    items_BG: torch.Tensor  # rows of the SID table; -1 in a place that no item reached
    scores_BG: torch.Tensor  # log-probabilities, float32; -inf there
    nodes: list[torch.Tensor]  # per depth from 1: the trie's nodes [B, G] that the beams held, in SID order


@torch.no_grad()
def beam_search(
    model: Any,
    trie: Trie,
    vocabulary: SidVocabulary,
    prompts: list[np.ndarray],
    *,
    beams: int,
    score: str,
    excluded: list[np.ndarray] | None = None,
) -> Beams:
    """The best items for each prompt.

    ``prompts`` are token ids that end with the begin delimiter. A score is the sum of the log-probabilities of
    the item's codes: ``exact`` under the softmax over the whole vocabulary (as transformers' generate),
    ``restricted`` under the softmax over the valid children. Ties go to the smaller SID. G is ``beams``, or the
    number of items where that is smaller.

    ``excluded`` are rows of the SID table that a prompt's search does without, as if the trie lacked them: no beam
    follows codes that only they have, so that none is lost to them. The scores of the others stay what they are.
    """
    device = model.device
    ids_1U, packing = pack_sequences(prompts)
    ids_1U, packing = ids_1U.to(device), packing.to(device)
    cache = BeamCache(packing)
    hidden = _hidden(model, ids_1U, packing.positions_1U, packing=packing, beams=cache)
    hidden_BGD = hidden[0, packing.rows(packing.lengths_B.cumsum(0) - 1)].unsqueeze(1)
    node_BG = torch.zeros(len(prompts), 1, dtype=torch.long, device=device)
    score_BG = torch.zeros(len(prompts), 1, device=device)
    nodes = []
    emptied = trie.emptied(excluded) if excluded is not None else [None] * trie.depth
    for depth in range(trie.depth):
        logp_BGK = _level_scores(model, hidden_BGD, vocabulary, depth, score)
        parent_BG, node_BG, score_BG, code_BG = _step(
            trie, depth, node_BG, score_BG, logp_BGK, emptied[depth], beams=beams, renormalise=score == "restricted"
        )
        nodes.append(node_BG.masked_fill(score_BG == float("-inf"), -1))
        if depth + 1 == trie.depth:
            break
        cache.follow(parent_BG)
        ids_BG = vocabulary.level_first_ids[depth] + code_BG
        positions_BG = (packing.lengths_B + depth)[:, None].expand_as(ids_BG)
        hidden_BGD = _hidden(model, ids_BG, positions_BG, beams=cache)
    # The beams stand in SID order, so that in a stable sort ties go to the smaller.
    score_BG, place_BG = (t[:, : len(trie.item_N)] for t in score_BG.sort(dim=1, descending=True, stable=True))
    items_BG = trie.item_N[node_BG.gather(1, place_BG)]
    return Beams(items_BG.masked_fill(score_BG == float("-inf"), -1), score_BG, nodes)


def _hidden(model: Any, ids: torch.Tensor, positions: torch.Tensor, **attention: Any) -> torch.Tensor:
    decoder = model.get_decoder()
    return decoder(input_ids=ids, position_ids=positions, use_cache=False, **attention).last_hidden_state


def _level_scores(
    model: Any, hidden_BGD: torch.Tensor, vocabulary: SidVocabulary, level: int, score: str
) -> torch.Tensor:
    """Log-probabilities of a level's codes [B, G, K]; under ``restricted`` the bare logits.

    The codes' logits are formed in float32 whatever the model's precision: bfloat16 would round codes of nearly
    the same score to ties. The exact normaliser needs the logits of the whole vocabulary, formed for a few beams at
    a time.
    """
    head = model.get_output_embeddings()
    first = vocabulary.level_first_ids[level]
    size = vocabulary.sizes[level]
    B, G, _ = hidden_BGD.shape
    hidden_MD = hidden_BGD.reshape(B * G, -1)
    with torch.autocast(hidden_MD.device.type, enabled=False):
        rows_KD = head.weight[first : first + size].float()
        bias = None if head.bias is None else head.bias[first : first + size].float()
        logits_MK = torch.nn.functional.linear(hidden_MD.float(), rows_KD, bias)
    if score == "restricted":
        return logits_MK.view(B, G, size)
    chunks = []
    for chunk in hidden_MD.split(max(LOGITS_AT_ONCE // head.weight.shape[0], 1)):
        logits = head(chunk).float()
        most = logits.amax(dim=1, keepdim=True)
        chunks.append((logits - most).exp_().sum(dim=1, keepdim=True).log() + most)  # much quicker than logsumexp
    return (logits_MK - torch.cat(chunks)).view(B, G, size)


def _step(
    trie: Trie,
    depth: int,
    node_BG: torch.Tensor,
    score_BG: torch.Tensor,
    logp_BGK: torch.Tensor,
    emptied: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    *,
    beams: int,
    renormalise: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Extend all beams by all their children but those `emptied`, and keep the best: parent, node, score, code [B, G'].

    Beams are kept in SID order, so candidates stand in SID order and a stable sort breaks ties by it.
    """
    child_BGC, absent_BGC = trie.children(depth, node_BG)
    code_BGC = trie.codes[depth][child_BGC]
    logp_BGC = logp_BGK.gather(2, code_BGC).masked_fill_(absent_BGC, float("-inf"))
    if renormalise:
        logp_BGC = logp_BGC - logp_BGC.logsumexp(dim=2, keepdim=True)
    total_BGC = score_BG[..., None] + logp_BGC
    if emptied is not None:
        search_P, gone_from_P, child_P = emptied
        place, beam = (node_BG[search_P] == gone_from_P[:, None]).nonzero(as_tuple=True)
        total_BGC[search_P[place], beam, child_P[place]] = float("-inf")
    total = total_BGC.flatten(1)
    chosen = _first_of_best(total, min(beams, total.shape[1]))
    parent_BG = chosen // child_BGC.shape[2]
    return (
        parent_BG,
        child_BGC.flatten(1).gather(1, chosen),
        total.gather(1, chosen),
        code_BGC.flatten(1).gather(1, chosen),
    )


def _first_of_best(total_BN: torch.Tensor, kept: int) -> torch.Tensor:
    """Places [B, kept] of the largest float32 numbers of each row, of equal ones the first; in their order in the row.

    `topk` leaves open which of equal numbers it takes, and a stable sort of all takes five times as long where there
    are thousands. So each number and its place become one integer, of which no two are equal.
    """
    bits = (total_BN + 0.0).view(torch.int32)  # + 0.0, because -0.0 equals 0.0 and has other bits
    rank = bits ^ (bits >> 31 & 0x7FFFFFFF)  # in the order of the numbers: of negative ones the bits count backwards
    back_N = torch.arange(total_BN.shape[1] - 1, -1, -1, device=total_BN.device)
    return (rank.long() << 32 | back_N).topk(kept, dim=1, sorted=False).indices.sort(dim=1).values


@dataclass(frozen=True)
class Decoded:
    """The beams of many prompts, on the CPU."""

    items_UG: np.ndarray  # rows of the SID table, best first; -1 where none
    scores_UG: np.ndarray
    kept_UL: np.ndarray | None  # whether the beams held the target's prefix of 1, 2, … L + 1 codes


def decode(
    model: Any,
    trie: Trie,
    vocabulary: SidVocabulary,
    prompts: list[np.ndarray],
    *,
    beams: int,
    score: str = "exact",
    batch_tokens: int = 4096,
    autocast: torch.dtype | None = None,
    targets: np.ndarray | None = None,
    excluded: list[np.ndarray] | None = None,
    what: str = "decode",
) -> Decoded:
    """Beam search for many prompts in batches of similar length, at most ``batch_tokens`` prompt tokens each.

    ``autocast`` computes in that dtype over weights of another. ``targets`` are rows of the SID table: where
    given, it is also told at which depth the beams still held them. ``excluded`` are the rows that each prompt's search
    does without; they change nothing for other prompts. Batches are smaller where many beams over a wide level ask for
    it, and are halved when the memory is used up; beams are never fewer than asked for. Raises ValueError where it does
    not hold a single prompt.
    """
    trie = trie.to(model.device)
    width = min(beams, len(trie.item_N))
    items_UG = np.full((len(prompts), width), -1)
    scores_UG = np.full((len(prompts), width), -np.inf, dtype=np.float32)
    kept_UL = None if targets is None else np.zeros((len(prompts), trie.depth), dtype=bool)
    precision = torch.autocast(model.device.type, autocast) if autocast else contextlib.nullcontext()
    most = SCORES_AT_ONCE // (width * max(vocabulary.sizes))
    groups = list(batches_by_length([len(p) for p in prompts], batch_tokens, most))
    with Progress(what, len(prompts), "users") as progress, precision:
        while groups:
            group = groups.pop(0)
            found = None
            with suppressing_out_of_memory():  # the error's traceback would keep the tensors of the search
                found = beam_search(
                    model, trie, vocabulary, [prompts[i] for i in group],
                    beams=beams, score=score, excluded=excluded and [excluded[i] for i in group],
                )  # fmt: skip
            if found is None:
                groups = _halved([group, *groups], len(prompts[group[0]]), beams)
                continue
            items_UG[group] = found.items_BG.cpu().numpy()
            scores_UG[group] = found.scores_BG.cpu().numpy()
            if targets is not None and kept_UL is not None:
                path = trie.path(torch.from_numpy(targets[group]).to(model.device))
                held = [(n == p[:, None]).any(dim=1) for n, p in zip(found.nodes, path, strict=True)]
                kept_UL[group] = torch.stack(held, dim=1).cpu().numpy()
            progress.update(len(group))
    return Decoded(items_UG, scores_UG, kept_UL)


def _halved(groups: list[list[int]], tokens: int, beams: int) -> list[list[int]]:
    """Each group in two, the first of which, with prompts of up to ``tokens``, was too large for the memory."""
    if len(groups[0]) == 1:
        raise ValueError(
            f"the memory does not hold the search of {beams} beams for one prompt of {tokens} tokens: ask for fewer"
            " beams or items, give prompts of fewer tokens (max_length), or free memory that others use."
        )
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    halves = [half for group in groups for half in (group[: (len(group) + 1) // 2], group[(len(group) + 1) // 2 :])]
    return [half for half in halves if half]


def batches_by_length(lengths: list[int], batch_tokens: int, most: int) -> Iterator[list[int]]:
    """Group prompts of similar length, longest first: ``most`` prompts and ``batch_tokens`` tokens at most, or one."""
    group: list[int] = []
    tokens = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if group and (tokens + lengths[index] > batch_tokens or len(group) >= most):
            yield group
            group, tokens = [], 0
        group.append(index)
        tokens += lengths[index]
    if group:
        yield group
