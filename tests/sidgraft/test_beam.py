"""Trie and beam search against exhaustive scoring with the stock model."""

import ast
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sidgraft import beam
from sidgraft.attention import use_packed_attention
from sidgraft.beam import _first_of_best, batches_by_length, beam_search, decode
from sidgraft.devices import suppressing_out_of_memory
from sidgraft.models import add_tokens, load_base, put_rows
from sidgraft.trie import Trie, build_trie


def catalog(seed=0, sizes=(4, 3, 3, 2), items=25):
    """Random distinct codes with shared prefixes and ragged last levels, in no order."""
    rng = np.random.default_rng(seed)
    everything = np.array(list(itertools.product(*map(range, sizes))))
    return everything[rng.choice(len(everything), items, replace=False)]


def grafted(sizes=(4, 3, 3, 2)):
    model, tokenizer = load_base("tiny")
    vocabulary = add_tokens(tokenizer, list(sizes))
    model.resize_token_embeddings(vocabulary.first_id + vocabulary.n_new, mean_resizing=False)
    rows = torch.randn(vocabulary.n_new, 64, generator=torch.Generator().manual_seed(3)) * 0.15
    put_rows(model, vocabulary, {"rows": rows})
    return model.eval(), vocabulary


def prompts_of(vocabulary, lengths=(3, 11, 6, 1)):
    rng = np.random.default_rng(5)
    return [np.append(rng.integers(0, 250, n), vocabulary.begin_id) for n in lengths]


def exhaustive(model, vocabulary, codes_NL, prompt, score):
    """Scores of all items by one plain forward pass each, restricted or not, in float64."""
    scores = []
    for codes in codes_NL:
        tokens = np.asarray(vocabulary.level_first_ids) + codes
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(np.append(prompt, tokens))[None]).logits[0].double()
        total = 0.0
        for level, token in enumerate(tokens):
            at = logits[len(prompt) - 1 + level]
            if score == "restricted":
                valid = np.unique(codes_NL[(codes_NL[:, :level] == codes[:level]).all(axis=1), level])
                at = at[vocabulary.level_first_ids[level] + torch.from_numpy(valid)]
                total += (at.log_softmax(0)[int(np.searchsorted(valid, codes[level]))]).item()
            else:
                total += at.log_softmax(0)[token].item()
        scores.append(total)
    return np.asarray(scores)


@pytest.mark.parametrize(("score", "beams_at_once"), [("exact", None), ("exact", 3), ("restricted", None)])
def test_with_as_many_beams_as_items_it_is_exhaustive_search(monkeypatch, score, beams_at_once):
    model, vocabulary = grafted()
    rows = len(model.get_output_embeddings().weight)
    if beams_at_once:  # the normaliser of the exact score is formed for so many; 3 does not divide the 4 of the start
        monkeypatch.setattr(beam, "LOGITS_AT_ONCE", beams_at_once * rows + rows // 2)
    codes_NL = catalog()
    prompts = prompts_of(vocabulary)
    expected = [exhaustive(model, vocabulary, codes_NL, prompt, score) for prompt in prompts]
    use_packed_attention(model)
    found = beam_search(model, build_trie(codes_NL), vocabulary, prompts, beams=len(codes_NL), score=score)
    for b, scores in enumerate(expected):
        order = np.argsort(-scores, kind="stable")
        assert found.items_BG[b].tolist() == order.tolist()
        np.testing.assert_allclose(found.scores_BG[b].numpy(), scores[order], atol=1e-4)


def step_by_step(model, vocabulary, codes_NL, prompt, beams):
    """Plain beam search with Python sets over prefixes, one full forward pass a beam and level."""
    kept = [((), 0.0)]
    for level in range(codes_NL.shape[1]):
        candidates = []
        for prefix, total in kept:
            tokens = [vocabulary.level_first_ids[i] + c for i, c in enumerate(prefix)]
            with torch.no_grad():
                ids = torch.from_numpy(np.append(prompt, tokens).astype(np.int64))[None]
                logp = model(input_ids=ids).logits[0, -1].double().log_softmax(0)
            children = {int(c[level]) for c in codes_NL if tuple(c[:level]) == prefix}
            candidates += [((*prefix, c), total + logp[vocabulary.level_first_ids[level] + c].item()) for c in children]
        kept = sorted(candidates, key=lambda pair: (-pair[1], pair[0]))[:beams]
    return kept


@pytest.mark.parametrize("beams", [1, 3, 8])
def test_with_few_beams_it_is_plain_beam_search_and_every_beam_is_an_item(beams):
    model, vocabulary = grafted()
    codes_NL = catalog(seed=1)
    prompts = prompts_of(vocabulary)
    expected = [step_by_step(model, vocabulary, codes_NL, prompt, beams) for prompt in prompts]
    use_packed_attention(model)
    found = beam_search(model, build_trie(codes_NL), vocabulary, prompts, beams=beams, score="exact")
    for b, kept in enumerate(expected):
        assert [tuple(codes_NL[i]) for i in found.items_BG[b].tolist()] == [prefix for prefix, _ in kept]
        np.testing.assert_allclose(found.scores_BG[b].numpy(), [total for _, total in kept], atol=1e-4)


def test_a_batch_of_unequal_histories_gives_what_one_by_one_gives():
    model, vocabulary = grafted()
    use_packed_attention(model)
    trie = build_trie(catalog())
    prompts = prompts_of(vocabulary, (3, 40, 6, 1, 17))
    together = decode(model, trie, vocabulary, prompts, beams=6, batch_tokens=10_000)
    alone = decode(model, trie, vocabulary, prompts, beams=6, batch_tokens=1)
    assert together.items_UG.tolist() == alone.items_UG.tolist()
    np.testing.assert_allclose(together.scores_UG, alone.scores_UG, atol=1e-4)


def exclusions(codes_NL):
    """Rows that three prompts do without: none; a few, one named twice, and all under one first code; all but two."""
    under_a_code = np.flatnonzero(codes_NL[:, 0] == codes_NL[0, 0])
    few = np.concatenate([under_a_code, under_a_code[:1], np.arange(9, 13)])
    return [np.zeros(0, np.int64), few, np.arange(2, len(codes_NL))]


@pytest.mark.parametrize("score", ["exact", "restricted"])
def test_excluded_items_are_left_out_of_an_exhaustive_search_and_change_no_score(score):
    model, vocabulary = grafted()
    codes_NL = catalog()
    prompts = prompts_of(vocabulary)
    excluded = [*exclusions(codes_NL), np.arange(len(codes_NL))]
    expected = [exhaustive(model, vocabulary, codes_NL, prompt, score) for prompt in prompts]
    use_packed_attention(model)
    found = beam_search(model, build_trie(codes_NL), vocabulary, prompts, beams=50, score=score, excluded=excluded)
    for b, (scores, out) in enumerate(zip(expected, excluded, strict=True)):
        order = [item for item in np.argsort(-scores, kind="stable") if item not in out]
        assert found.items_BG[b].tolist() == order + [-1] * (len(codes_NL) - len(order))
        np.testing.assert_allclose(found.scores_BG[b, : len(order)].numpy(), scores[order], atol=1e-4)
        assert (found.scores_BG[b, len(order) :] == float("-inf")).all()


@pytest.mark.parametrize("beams", [1, 3, 8])
def test_few_beams_go_through_the_catalog_without_the_excluded_items_and_none_is_lost(beams):
    model, vocabulary = grafted()
    codes_NL = catalog(seed=1)
    prompts, excluded = prompts_of(vocabulary)[:3], exclusions(codes_NL)
    expected = []
    for prompt, out in zip(prompts, excluded, strict=True):
        left = np.delete(codes_NL, out, axis=0)
        expected.append([prefix for prefix, _ in step_by_step(model, vocabulary, left, prompt, beams)])
        assert len(expected[-1]) == min(beams, len(left))
    use_packed_attention(model)
    trie, targets = build_trie(codes_NL), np.array([0, excluded[1][0], 24])
    found = decode(model, trie, vocabulary, prompts, beams=beams, excluded=excluded, targets=targets)
    assert [[tuple(codes_NL[i]) for i in row if i >= 0] for row in found.items_UG.tolist()] == expected
    assert not found.kept_UL[1:].all(axis=1).any()  # what is excluded is no beam


def test_what_one_prompt_does_without_changes_nothing_for_another():
    model, vocabulary = grafted()
    use_packed_attention(model)
    trie = build_trie(catalog())
    prompts, excluded = prompts_of(vocabulary), [np.arange(23), np.array([3]), np.arange(5, 8), np.zeros(0, np.int64)]
    together = decode(model, trie, vocabulary, prompts, beams=2, excluded=excluded)
    for user in range(4):
        alone = decode(model, trie, vocabulary, prompts[user : user + 1], beams=2, excluded=excluded[user : user + 1])
        assert together.items_UG[user].tolist() == alone.items_UG[0].tolist()
        np.testing.assert_allclose(together.scores_UG[user], alone.scores_UG[0], atol=1e-4)


def fitting(monkeypatch, most):
    """Let only ``most`` prompts at a time fit the memory; returns the sizes of the batches that were tried."""
    tried = []

    def search(model, trie, vocabulary, prompts, **settings):
        tried.append(len(prompts))
        if len(prompts) > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return beam_search(model, trie, vocabulary, prompts, **settings)

    monkeypatch.setattr(beam, "beam_search", search)
    return tried


def test_a_batch_that_the_memory_does_not_hold_is_halved_with_all_its_beams(monkeypatch):
    model, vocabulary = grafted()
    use_packed_attention(model)
    trie = build_trie(catalog())
    prompts = prompts_of(vocabulary, (3, 40, 6, 1, 17, 2, 2, 3, 3))
    excluded = [np.arange(n) for n in range(9)]
    settings = {"beams": 6, "batch_tokens": 80, "targets": np.arange(9), "excluded": excluded}
    whole = decode(model, trie, vocabulary, prompts, **settings)
    tried = fitting(monkeypatch, 2)
    found = decode(model, trie, vocabulary, prompts, **settings)
    assert tried == [6, 3, 2, 1, 2, 1, 1, 1, 1]  # once it was too many, the batches that follow are halved with it
    assert found.items_UG.tolist() == whole.items_UG.tolist()
    assert found.kept_UL.tolist() == whole.kept_UL.tolist()
    np.testing.assert_allclose(found.scores_UG, whole.scores_UG, atol=1e-4)


LIMITED = """
import resource, sys
import numpy as np
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_beam import beam, beam_search, build_trie, catalog, decode, grafted, use_packed_attention

model, vocabulary = grafted()
use_packed_attention(model)
rng = np.random.default_rng(0)
prompts = [rng.integers(0, 250, 256) for _ in range(64)]
tried = []

def search(model, trie, vocabulary, prompts, **settings):
    tried.append(len(prompts))
    return beam_search(model, trie, vocabulary, prompts, **settings)

beam.beam_search = search
few, many = (dict(beams=6, batch_tokens=256 * n) for n in (4, 64))
expected = decode(model, build_trie(catalog()), vocabulary, prompts, **few)
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (128 << 20),) * 2)
tried.clear()
found = decode(model, build_trie(catalog()), vocabulary, prompts, **many)
assert found.items_UG.tolist() == expected.items_UG.tolist()
np.testing.assert_allclose(found.scores_UG, expected.scores_UG, atol=1e-4)
print(tried)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_on_a_cpu_a_batch_is_halved_where_the_memory_of_a_process_is_limited():
    """64 prompts attend with 64 MB of scores at least three times over, and 128 MB are left."""
    arguments = [sys.executable, "-c", LIMITED, str(Path(__file__).parent)]
    shown = subprocess.run(arguments, capture_output=True, text=True, timeout=600)
    assert shown.returncode == 0, shown.stderr
    tried = ast.literal_eval(shown.stdout.splitlines()[-1])
    assert tried[:2] == [64, 32]
    assert sum(tried) > 64


def test_an_error_that_has_nothing_to_do_with_memory_is_raised(monkeypatch):
    model, vocabulary = grafted()
    use_packed_attention(model)

    def search(*_, **__):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(beam, "beam_search", search)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        decode(model, build_trie(catalog()), vocabulary, prompts_of(vocabulary), beams=6)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory."), MemoryError("Unable to allocate"), RuntimeError("std::bad_alloc")],
)
def test_an_error_of_memory_ends_the_work_that_it_stopped(error):
    with suppressing_out_of_memory():
        raise error


def test_one_prompt_that_the_memory_does_not_hold_is_an_error_that_says_what_to_lower(monkeypatch):
    model, vocabulary = grafted()
    use_packed_attention(model)
    fitting(monkeypatch, 0)
    with pytest.raises(ValueError, match=r"search of 6 beams for one prompt of 12 tokens: ask for fewer beams"):
        decode(model, build_trie(catalog()), vocabulary, prompts_of(vocabulary), beams=6)


def test_a_batch_holds_fewer_prompts_where_many_beams_meet_a_wide_level(monkeypatch):
    model, vocabulary = grafted(sizes=(4, 3, 3, 5))
    use_packed_attention(model)
    monkeypatch.setattr(beam, "SCORES_AT_ONCE", 2 * 6 * 5 + 6)  # of two prompts and a bit
    tried = fitting(monkeypatch, 9)
    decode(model, build_trie(catalog()), vocabulary, prompts_of(vocabulary), beams=6)
    assert tried == [2, 2]


def test_more_beams_than_items_leave_no_empty_place():
    model, vocabulary = grafted()
    use_packed_attention(model)
    codes_NL = catalog(items=7)
    found = beam_search(model, build_trie(codes_NL), vocabulary, prompts_of(vocabulary), beams=50, score="exact")
    assert found.items_BG.shape == (4, 7)
    assert all(sorted(row) == list(range(7)) for row in found.items_BG.tolist())


def test_equal_scores_go_to_the_smaller_semantic_id():
    model, vocabulary = grafted()
    put_rows(model, vocabulary, {"rows": torch.ones(vocabulary.n_new, 64) * 0.1})  # as under `mean`
    use_packed_attention(model)
    codes_NL = catalog()
    found = beam_search(model, build_trie(codes_NL), vocabulary, prompts_of(vocabulary), beams=5, score="exact")
    smallest = np.lexsort(codes_NL.T[::-1])[:5].tolist()
    assert found.items_BG.tolist() == [smallest] * 4


def test_the_sampling_settings_of_a_checkpoint_are_not_read():
    model, vocabulary = grafted()
    use_packed_attention(model)
    trie, prompts = build_trie(catalog()), prompts_of(vocabulary)
    before = beam_search(model, trie, vocabulary, prompts, beams=5, score="exact")
    model.generation_config.update(do_sample=True, temperature=9.0, top_k=1, repetition_penalty=5.0, num_beams=1)
    after = beam_search(model, trie, vocabulary, prompts, beams=5, score="exact")
    assert torch.equal(before.items_BG, after.items_BG)
    assert torch.equal(before.scores_BG, after.scores_BG)


def test_it_is_told_at_which_level_the_target_was_lost():
    model, vocabulary = grafted()
    codes_NL = catalog(seed=1)
    prompts = prompts_of(vocabulary)
    targets = np.array([4, 9, 14, 19])
    expected = np.zeros((4, 4), dtype=bool)
    for user, (prompt, target) in enumerate(zip(prompts, targets, strict=True)):
        for level in range(4):
            prefixes = np.unique(codes_NL[:, : level + 1], axis=0)
            kept = step_by_step(model, vocabulary, prefixes, prompt, 3)
            expected[user, level] = tuple(codes_NL[target, : level + 1]) in [prefix for prefix, _ in kept]
    use_packed_attention(model)
    found = decode(model, build_trie(codes_NL), vocabulary, prompts, beams=3, targets=targets)
    assert found.kept_UL.tolist() == expected.tolist()
    assert expected.any()
    assert not expected.all()


def test_what_grows_with_the_catalog_is_done_once_a_trie_and_not_once_a_batch(monkeypatch):
    made, inverse = [], Trie.leaf_N.func
    monkeypatch.setattr(Trie.leaf_N, "func", lambda trie: made.append(len(trie.item_N)) or inverse(trie))
    model, vocabulary = grafted()
    use_packed_attention(model)
    trie = build_trie(catalog())
    for _ in range(2):
        settings = {"targets": np.arange(4), "excluded": [np.array([7])] * 4, "batch_tokens": 1}
        decode(model, trie, vocabulary, prompts_of(vocabulary), beams=3, **settings)
    assert made == [25]
    assert trie.leaf_N[trie.item_N].tolist() == list(range(25))


@pytest.mark.parametrize("seed", range(5))
def test_the_best_candidates_are_the_first_of_a_stable_sort_whatever_ties(seed):
    rng = np.random.default_rng(seed)
    numbers = np.array([float("-inf"), -1e30, -2.5, -0.0, 0.0, 1e-40, 2.5, 3e38], np.float32)
    total = torch.from_numpy(numbers[rng.integers(0, len(numbers), (4, 50))])
    for kept in (1, 7, 50):
        expected = total.sort(dim=1, descending=True, stable=True).indices[:, :kept].sort(dim=1).values
        assert torch.equal(_first_of_best(total, kept), expected)


@pytest.mark.parametrize("spread", [1, 2**30], ids=["small", "products above 64 bits"])
@pytest.mark.parametrize("seed", range(5))
def test_the_trie_against_sets_of_prefixes(seed, spread):
    codes_NL = catalog(seed=seed, items=int(np.random.default_rng(seed).integers(1, 60))) * spread
    trie = build_trie(codes_NL)
    frontier = {(): 0}
    for depth in range(4):
        following = {}
        for prefix, node in frontier.items():
            numbers, absent = trie.children(depth, torch.tensor([node]))
            children = {int(trie.codes[depth][n]): int(n) for n in numbers[~absent]}
            assert sorted(children) == sorted({int(c[depth]) for c in codes_NL if tuple(c[:depth]) == prefix})
            following |= {(*prefix, code): number for code, number in children.items()}
        frontier = following
    assert {prefix: int(trie.item_N[leaf]) for prefix, leaf in frontier.items()} == {
        tuple(map(int, codes)): item for item, codes in enumerate(codes_NL)
    }
    path = trie.path(torch.arange(len(codes_NL)))
    assert [frontier[tuple(map(int, c))] for c in codes_NL] == path[-1].tolist()


def test_two_items_with_one_semantic_id_are_refused():
    with pytest.raises(ValueError, match="items 0 and 2 have the same Semantic ID"):
        build_trie(np.array([[1, 0], [0, 0], [1, 0]]))


def test_batches_hold_every_prompt_once_within_the_budget():
    lengths = [5, 90, 3, 40, 41, 2, 7]
    groups = list(batches_by_length(lengths, 60, 3))
    assert sorted(i for group in groups for i in group) == list(range(7))
    assert all(sum(lengths[i] for i in group) <= 60 or len(group) == 1 for group in groups)
    assert max(map(len, groups)) == 3
