"""One constrained step of beam search at 12 thousand, 1 and 10 million items. Run: python benchmarks/constraint.py.

Peers: transformers' processor chain (log-softmax over the vocabulary, `PrefixConstrainedLogitsProcessor` over a
set-based trie, top-k), the same without its log-softmax, and a dense first level with a CSR gather below it (the method
of STATIC). Ours and the last two are given the log-probabilities, whose normaliser the chain computes. All must choose
the same nodes, but for ties with the last one, with the same scores. The time to build the trie is measured against one
of Python dictionaries, of 100,000 items at most: what more of them would take is that time by the number of items.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from measure import bandwidth_roof, medians, options, report
from transformers import PrefixConstrainedLogitsProcessor

from sidgraft.beam import _step
from sidgraft.trie import Trie, build_trie

BEAMS = 50
VOCABULARY = 151_936
LEVELS, CODES = 3, 256
FEW = 100_000  # items of which dictionaries are built
NEAR = 1e-4  # scores this near to the last one are ties
DEPTH = 2  # the step that is measured: from two codes to three, where most beams have several children
Found = tuple[torch.Tensor, torch.Tensor]  # scores [1, G], best first, and places among the tokens of all beams


def main() -> None:
    args = options(__doc__)
    sizes = [12_000, 1_000_000] if args.quick else [12_000, 1_000_000, 10_000_000]
    rounds = 5 if args.quick else 15
    ratios: dict[str, tuple[float, float]] = {}
    seconds: dict[str, float] = {}
    equal: dict[str, Any] = {}
    roof: dict[str, float] = {}
    memory = bandwidth_roof()
    for items in sizes:
        codes_NL = catalog(items)
        started = time.perf_counter()
        trie = build_trie(codes_NL)
        build = time.perf_counter() - started
        few = codes_NL[:FEW]  # dictionaries of millions would not fit; a dictionary's time is linear in items
        started = time.perf_counter()
        dictionary(few)
        theirs = (time.perf_counter() - started) * items / len(few)
        runs, scores_agree, nodes_agree = step_runs(trie, codes_NL)
        measured = medians(runs, rounds)
        label = f"{items:,} items"
        seconds |= {f"{name}, {label}": value for name, value in measured.items()}
        counted = f" (reckoned from {FEW:,})" if items > FEW else ""
        seconds |= {f"build, {label}": build, f"build of dictionaries{counted}, {label}": theirs}
        for peer, goal in (("processor chain", 1000), ("mask and top-k alone", 1), ("dense + CSR gather", 1)):
            ratios[f"{peer}, {label}"] = (measured[peer] / measured["sidgraft"], goal)
        ratios[f"dictionaries built{counted}, {label}"] = (theirs / build, 5)
        equal |= {f"same scores, {label}": scores_agree, f"same nodes, {label}": nodes_agree}
        touched = 8 * BEAMS * trie.most_children[DEPTH] * 4  # child numbers, codes, scores, sort
        roof[f"share of memory bandwidth, {label}"] = touched / measured["sidgraft"] / memory
    report(
        args,
        "constraint",
        ratios,
        equal=equal,
        roof=roof,
        seconds=seconds,
        about=f"one step of {BEAMS} beams, depth {DEPTH} of {LEVELS + 1}, vocabulary {VOCABULARY}",
    )


def catalog(items: int) -> np.ndarray:
    """Unique codes [N, L+1], the last level counting items that share the others."""
    rng = np.random.default_rng(0)
    size = CODES if items <= 4_000_000 else 1024
    codes_NL = np.minimum(rng.gamma(2.0, size / 6, (items, LEVELS)).astype(np.int64), size - 1)
    order = np.lexsort(codes_NL.T[::-1])
    new = np.r_[True, (codes_NL[order][1:] != codes_NL[order][:-1]).any(axis=1)]
    starts = np.flatnonzero(new)
    rank = np.empty(items, np.int64)
    rank[order] = np.arange(items) - np.repeat(starts, np.diff(np.r_[starts, items]))
    return np.column_stack([codes_NL, rank])


def dictionary(codes_NL: np.ndarray) -> dict[tuple[int, ...], list[int]]:
    """The set-based trie that callers of transformers write."""
    children: dict[tuple[int, ...], set[int]] = {}
    for row in codes_NL.tolist():
        for depth in range(len(row)):
            children.setdefault(tuple(row[:depth]), set()).add(row[depth])
    return {prefix: sorted(codes) for prefix, codes in children.items()}


def step_runs(trie: Trie, codes_NL: np.ndarray) -> tuple[Any, bool, bool]:
    """The same step four ways, and whether all find the same scores and the same nodes. Codes are token ids 0..K-1.

    Each returns scores, best first, and the places that they have among the tokens of all beams.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(min(len(codes_NL), 100_000), generator=generator)[: BEAMS * 4]
    nodes = torch.unique(trie.path(rows)[DEPTH - 1])[:BEAMS]
    beams = len(nodes)
    score_BG = torch.randn(1, beams, generator=generator).sort(descending=True).values
    logits = torch.randn(beams, VOCABULARY, generator=generator)
    width = int(trie.codes[DEPTH].max()) + 1
    logp_BGK = (logits[:, :width] - logits.logsumexp(1, keepdim=True))[None]

    def ours() -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        found = _step(trie, DEPTH, nodes[None], score_BG, logp_BGK, None, beams=beams, renormalise=False)
        scores, order = found[2].sort(descending=True)
        return scores, (order, *found)

    prefix = prefixes(trie, nodes)
    below = (codes_NL[:, None, :DEPTH] == prefix[None].numpy()).all(axis=2).any(axis=1)
    children = dictionary(codes_NL[below])  # of these beams alone: what the chain looks up is the same
    chain = PrefixConstrainedLogitsProcessor(lambda _, sent: children[tuple(sent.tolist())], beams)

    def processors() -> Found:
        scores = chain(prefix, torch.log_softmax(logits, dim=1)) + score_BG[0, :, None]
        return torch.topk(scores.view(1, -1), 2 * beams)

    logp = torch.log_softmax(logits, dim=1)

    def mask_and_topk() -> Found:
        scores = chain(prefix, logp) + score_BG[0, :, None]
        return torch.topk(scores.view(1, -1), 2 * beams)

    runs = {
        "sidgraft": ours,
        "processor chain": processors,
        "mask and top-k alone": mask_and_topk,
        "dense + CSR gather": lambda: gather(trie, nodes, score_BG, logp_BGK),
    }
    mine, (order, parent_BG, _, _, code_BG) = ours()
    chosen = (parent_BG * width + code_BG).gather(1, order)[0]
    answers = [(mine[0], chosen)]
    for peer, row in (
        ("processor chain", VOCABULARY),
        ("mask and top-k alone", VOCABULARY),
        ("dense + CSR gather", width),
    ):
        scores, place = (found[0, :beams] for found in runs[peer]())
        answers.append((scores, place // row * width + place % row))
    return runs, all(same_scores(mine[0], scores) for scores, _ in answers), same_nodes(answers)


def same_scores(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=0, atol=NEAR)


def same_nodes(answers: list[Any]) -> bool:
    """Whether answers, each scores [G] and nodes [G], name the same nodes but for ties with the last one."""
    sets = [set(nodes.tolist()) for _, nodes in answers]
    certain = [set(nodes[scores > scores.min() + NEAR].tolist()) for scores, nodes in answers]
    return all(sure <= found for sure in certain for found in sets)


def prefixes(trie: Trie, nodes: torch.Tensor) -> torch.Tensor:
    """The codes that lead to nodes at DEPTH, [G, DEPTH]."""
    codes = []
    for depth in range(DEPTH, 0, -1):
        codes.insert(0, trie.codes[depth - 1][nodes])
        nodes = torch.searchsorted(trie.first_child[depth - 1], nodes, right=True) - 1
    return torch.stack(codes, dim=1)


def gather(trie: Trie, nodes: torch.Tensor, score_BG: torch.Tensor, logp_BGK: torch.Tensor) -> Found:
    """STATIC's step: the children's token ids by CSR, scattered into a mask over all tokens, then top-k over all."""
    first, end = trie.first_child[DEPTH][nodes], trie.first_child[DEPTH][nodes + 1]
    place = first[:, None] + torch.arange(trie.most_children[DEPTH])
    exists = place < end[:, None]
    tokens = trie.codes[DEPTH][place.clamp(max=len(trie.codes[DEPTH]) - 1)]
    allowed = torch.full(logp_BGK.shape[1:], float("-inf"))
    allowed.scatter_reduce_(1, tokens, torch.where(exists, 0.0, float("-inf")), "amax")
    total = logp_BGK[0] + allowed + score_BG[0, :, None]
    return torch.topk(total.view(1, -1), score_BG.shape[1])


if __name__ == "__main__":
    main()
