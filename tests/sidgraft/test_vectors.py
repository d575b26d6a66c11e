"""Vectors in batches against the matrix that they are."""

import numpy as np

from sidgraft import kmeans
from sidgraft.vectors import Vectors, in_memory, sample_rows


def shuffled(matrix, step):
    """The rows of a matrix in another order, ``step`` at a time."""
    order = np.random.default_rng(5).permutation(len(matrix))

    def read():
        for first in range(0, len(matrix), step):
            rows = order[first : first + step]
            yield rows, matrix[rows]

    return Vectors(len(matrix), matrix.shape[1], read)


def test_rows_are_taken_in_the_order_asked_for_from_batches_in_any_order():
    matrix = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    rows = np.array([40, 3, 49, 0, 17])
    for vectors in (in_memory(matrix), shuffled(matrix, 7), shuffled(matrix, 1)):
        assert np.array_equal(vectors.take(rows), matrix[rows])
        assert np.array_equal(vectors.take(np.arange(50)), matrix)
        assert vectors.take(rows[:0]).shape == (0, 4)


def test_a_change_is_made_to_what_is_read_and_to_no_other_row():
    matrix = np.arange(60, dtype=np.float32).reshape(20, 3)
    seen = []

    def halved(batch):
        seen.append(len(batch))
        return batch[:, :2] / 2

    vectors = shuffled(matrix, 6).changed(halved, 2)
    assert vectors.width == 2
    assert np.array_equal(vectors.take(np.array([5, 1])), matrix[[5, 1], :2] / 2)
    assert sum(seen) == 2
    assert all(np.array_equal(batch, matrix[rows, :2] / 2) for rows, batch in vectors.batches())
    assert sum(seen) == 22


def test_a_matrix_comes_in_small_batches_of_float32(monkeypatch):
    monkeypatch.setattr(kmeans, "SCORES_PER_CHUNK", 32)
    matrix = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float16)
    rows, parts = zip(*in_memory(matrix).batches(), strict=True)
    assert max(map(len, parts)) == 8
    assert np.array_equal(np.concatenate(rows), np.arange(50))
    assert np.array_equal(np.concatenate(parts), matrix.astype(np.float32))
    assert parts[0].dtype == np.float32


def test_samples_are_distinct_rows_in_order_by_seed_and_number():
    assert np.array_equal(sample_rows(9, 9, 0), np.arange(9))
    assert np.array_equal(sample_rows(9, 50, 3, 1), np.arange(9))
    first, again, other, second = (sample_rows(1000, 100, *seed) for seed in ((4,), (4,), (5,), (4, 1)))
    assert len(np.unique(first)) == 100
    assert np.array_equal(first, np.sort(first))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first, second)
