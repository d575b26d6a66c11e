"""Going on from published Semantic IDs: by hand, and against every possible numbering."""

from itertools import permutations

import numpy as np
import pytest

from sidgraft import continuity
from sidgraft.continuity import Issued

# Five Semantic IDs of one level: a to c are in use; d has left; b had another before its text changed.
ISSUED = Issued(["a", "b", "c", "d", "b"], np.array([[1, 0], [2, 0], [1, 2], [1, 1], [3, 0]]), 3)


def given(item_ids, **encoded):
    codes = continuity.extended(ISSUED, item_ids, {item: np.array([code]) for item, code in encoded.items()})
    return dict(zip(item_ids, map(tuple, codes.tolist()), strict=True))


def test_items_keep_theirs_and_new_ones_take_what_nobody_ever_had():
    assert given(["a", "b", "c"]) == {"a": (1, 0), "b": (2, 0), "c": (1, 2)}
    found = given(["y", "a", "x", "b", "c", "z"], x=1, y=1, z=5)
    assert found == {"a": (1, 0), "b": (2, 0), "c": (1, 2), "x": (1, 3), "y": (1, 4), "z": (5, 0)}
    assert list(found) == ["y", "a", "x", "b", "c", "z"]


def test_a_changed_item_moves_only_where_its_codes_do_and_comes_back_to_what_was_its_own():
    assert given(["a", "b", "c"], a=1)["a"] == (1, 0)
    assert given(["a", "b", "c"], a=2)["a"] == (2, 1)
    assert given(["a", "b", "c"], b=3)["b"] == (3, 0)
    assert given(["a", "c", "d"], d=1)["d"] == (1, 1)
    assert given(["a", "c", "d"], d=3)["d"] == (3, 1)  # (3, 0) was another's


def test_retired_are_those_given_that_are_nobodys_now():
    item_ids = ["a", "b", "c", "x"]
    codes = np.array([[1, 0], [3, 0], [1, 2], [1, 3]])
    rows = continuity.retired(ISSUED, item_ids, codes).to_pylist()
    assert rows == [{"item_id": "b", "codes": [2, 0]}, {"item_id": "d", "codes": [1, 1]}]


def test_no_semantic_id_ever_passes_to_another_item():
    """Random histories of a catalog: every (Semantic ID, item) pair ever seen stays one to one."""
    rng = np.random.default_rng(0)
    issued, owner = ISSUED, {}
    for item, sid in zip(issued.item_ids, issued.codes.tolist(), strict=True):
        owner[tuple(sid)] = item
    for _ in range(60):
        present = [f"{n}" for n in rng.permutation(30)[: rng.integers(1, 25)]]
        current = issued.current()
        texts = {item: np.array([rng.integers(3)]) for item in present if item not in current or rng.random() < 0.3}
        codes = continuity.extended(issued, present, texts)
        assert len(set(map(tuple, codes.tolist()))) == len(present)
        for item, sid in zip(present, codes.tolist(), strict=True):
            assert owner.setdefault(tuple(sid), item) == item
            assert item in texts or sid == current[item].tolist()
        lost = continuity.retired(issued, present, codes)
        rest = np.array(lost["codes"].to_pylist(), np.int64).reshape(-1, 2)
        issued = Issued(present + lost["item_id"].to_pylist(), np.concatenate([codes, rest]), len(present))
    assert len(owner) == len(issued.item_ids), "none is forgotten"


@pytest.mark.parametrize("seed", range(5))
def test_matching_has_the_largest_overlap_of_all_numberings(seed):
    rng = np.random.default_rng(seed)
    old, new = rng.integers(5, size=40), rng.integers(5, size=40)
    number, overlap = continuity.matched(old, new, 5)

    def jaccard(a, b):
        return ((new == a) & (old == b)).sum() / max(((new == a) | (old == b)).sum(), 1)

    assert sorted(number) == list(range(5))
    assert overlap == pytest.approx([jaccard(code, number[code]) for code in range(5)])
    best = max(sum(jaccard(code, tried[code]) for code in range(5)) for tried in permutations(range(5)))
    assert overlap.sum() == pytest.approx(best)


def test_matching_undoes_a_mere_renumbering():
    rng = np.random.default_rng(0)
    old, shuffled = rng.integers(16, size=300), rng.permutation(16)
    number, overlap = continuity.matched(old, shuffled[old], 16)
    assert np.array_equal(number[shuffled], np.arange(16))
    assert (overlap == 1).all()


def test_matching_without_a_common_item_is_still_a_numbering():
    number, overlap = continuity.matched(np.zeros(0, np.int64), np.zeros(0, np.int64), 4)
    assert sorted(number) == [0, 1, 2, 3]
    assert (overlap == 0).all()
