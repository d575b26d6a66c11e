"""Packed attention against each sequence by itself, by both ways to compute it; memory that is kept."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sidgraft import attention
from sidgraft.attention import Packing, Prefix, pack_sequences, shared_beginnings


class Layer(torch.nn.Module):
    layer_idx = 0


def states(T, heads, generator):
    return torch.randn(1, heads, T, 8, dtype=torch.float64, generator=generator).requires_grad_()


def one_by_one(query, key, value, lengths):
    """Causal attention of each sequence alone, with every key head written out for its query heads."""
    groups = query.shape[1] // key.shape[1]
    found, start = [], 0
    for n in lengths:
        q, k, v = (t[:, :, start : start + n] for t in (query, key, value))
        k, v = (torch.stack([t[:, h // groups] for h in range(q.shape[1])], dim=1) for t in (k, v))
        scores = q @ k.transpose(2, 3) * 0.3
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        found.append((scores.softmax(-1) @ v).transpose(1, 2))
        start += n
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("short", [0, 512], ids=["fused", "products"])
def test_a_packed_row_attends_within_each_sequence_and_so_do_its_gradients(monkeypatch, short):
    monkeypatch.setattr(attention, "SHORT", short)
    lengths = [5, 1, 9]
    generator = torch.Generator().manual_seed(0)
    q, k, v = states(15, 6, generator), states(15, 2, generator), states(15, 2, generator)
    weight = torch.randn(1, 15, 6, 8, dtype=torch.float64, generator=generator)
    gradients = []
    expected = one_by_one(q, k, v, lengths)
    found, _ = attention._attention(Layer(), q, k, v, None, scaling=0.3, packing=Packing.of(lengths))
    torch.testing.assert_close(found, expected)
    for result in (expected, found):
        gradients.append(torch.autograd.grad((result * weight).sum(), (q, k, v)))
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("short", [0, 512], ids=["fused", "products"])
def test_the_rest_of_sequences_attends_to_what_was_kept_of_their_beginnings(monkeypatch, short):
    monkeypatch.setattr(attention, "SHORT", short)
    lengths, first = [5, 3, 9], [2, 0, 8]
    generator = torch.Generator().manual_seed(1)
    q, k, v = states(17, 6, generator), states(17, 2, generator), states(17, 2, generator)
    expected = one_by_one(q, k, v, lengths)
    position_T = torch.cat([torch.arange(n) for n in lengths])
    is_first_T = position_T < torch.repeat_interleave(torch.tensor(first), torch.tensor(lengths))
    prefix = Prefix.of(Packing.of(lengths), is_first_T)
    for part, at in ((prefix.first, is_first_T), (prefix.rest, ~is_first_T)):
        given = (t[:, :, at] for t in (q, k, v))
        found, _ = attention._attention(Layer(), *given, None, scaling=0.3, packing=part, prefix=prefix)
        torch.testing.assert_close(found, expected[:, at])


SHARED = [[1, 1, 2, 0, 1], [1, 2], [1, 1, 2, 1, 1, 0], [1, 1, 2, 0, 2], [0, 1], [1, 1]]


def share(sequences):
    """The packing of sequences that share beginnings."""
    return pack_sequences([np.array(s) for s in sequences])[1]


@pytest.mark.parametrize("seed", range(8))
def test_tokens_share_a_place_where_all_up_to_them_is_alike_and_nowhere_else(seed):
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, 2, rng.integers(1, 9)) for _ in range(7)]
    alone_T = rng.random(sum(map(len, sequences))) < 0.2
    row_T, first_U = shared_beginnings(sequences, alone_T)
    beginnings = [tuple(s[: i + 1]) for s in sequences for i in range(len(s))]
    assert [beginnings[t] for t in first_U[row_T]] == beginnings
    assert sorted(set(row_T)) == list(range(len(first_U)))
    assert np.array_equal(row_T[first_U], np.arange(len(first_U)))
    assert np.isin(np.flatnonzero(alone_T), first_U).all()
    places = {}
    for t in np.flatnonzero(~alone_T):
        places.setdefault(beginnings[t], set()).add(int(row_T[t]))
    assert all(len(found) == 1 for found in places.values())
    assert len(first_U) <= len(places) + alone_T.sum()


def test_sequences_that_begin_differently_share_nothing():
    ids_1U, packing = pack_sequences([np.array([1, 2]), np.array([2, 2]), np.array([3])])
    assert ids_1U.tolist() == [[1, 2, 2, 2, 3]]
    assert packing.row_T is None


def test_a_packing_goes_to_another_device_whole():
    packing = share(SHARED)
    moved = packing.to("meta")
    tensors = ("lengths_B", "padded_T", "row_T", "first_U")
    assert {getattr(moved, name).device.type for name in tensors} == {"meta"}
    assert (moved.batch, moved.longest) == (packing.batch, packing.longest) == (6, 6)
    assert Packing.of([2, 1]).to("meta").row_T is None


@pytest.mark.parametrize("short", [0, 512], ids=["fused", "products"])
def test_a_row_that_holds_shared_beginnings_once_attends_as_all_written_out_and_so_do_its_gradients(monkeypatch, short):
    monkeypatch.setattr(attention, "SHORT", short)
    packing = share(SHARED)
    T, U = len(packing.row_T), len(packing.first_U)
    assert (T, U) == (22, 12)
    generator = torch.Generator().manual_seed(3)
    q, k, v = states(U, 6, generator), states(U, 2, generator), states(U, 2, generator)
    weight = torch.randn(1, T, 6, 8, dtype=torch.float64, generator=generator)
    expected = one_by_one(*(t[:, :, packing.row_T] for t in (q, k, v)), [len(s) for s in SHARED])
    found, _ = attention._attention(Layer(), q, k, v, None, scaling=0.3, packing=packing)
    torch.testing.assert_close(found[:, packing.row_T], expected)
    gradients = [
        torch.autograd.grad((result * weight).sum(), (q, k, v)) for result in (expected, found[:, packing.row_T])
    ]
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("first", [[2, 1, 2, 2, 0, 2], [5, 1, 3, 4, 2, 2], [1, 1, 1, 1, 0, 1]])
def test_shared_beginnings_may_stand_on_both_sides_of_what_runs_without_gradients(first):
    packing = share(SHARED)
    generator = torch.Generator().manual_seed(4)
    q, k, v = (states(len(packing.first_U), heads, generator) for heads in (6, 2, 2))
    expected = one_by_one(*(t[:, :, packing.row_T] for t in (q, k, v)), [len(s) for s in SHARED])
    position_T = torch.cat([torch.arange(len(s)) for s in SHARED])
    is_first_T = position_T < torch.repeat_interleave(torch.tensor(first), torch.tensor([len(s) for s in SHARED]))
    prefix = Prefix.of(packing, is_first_T)
    is_first_U = is_first_T[packing.first_U]
    for part, at_U, at_T in ((prefix.first, is_first_U, is_first_T), (prefix.rest, ~is_first_U, ~is_first_T)):
        given = (t[:, :, at_U] for t in (q, k, v))
        found, _ = attention._attention(Layer(), *given, None, scaling=0.3, packing=part, prefix=prefix)
        torch.testing.assert_close(found[:, part.row_T], expected[:, at_T])


def test_in_bfloat16_it_rounds_no_more_than_a_models_own_eager_attention():
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(3, heads, 40, 8, generator=generator).bfloat16() for heads in (6, 2, 2))
    wide_k, wide_v = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
    exact = scaled_dot_product_attention(q.double(), wide_k.double(), wide_v.double(), is_causal=True)
    bias = torch.full((40, 40), float("-inf")).triu(1).bfloat16()
    eager = (q @ wide_k.transpose(2, 3) * 8**-0.5 + bias).softmax(-1, dtype=torch.float32).bfloat16() @ wide_v
    ours = attention._attend_by_products(q, k, v, None, 8**-0.5)
    assert ours.dtype == torch.bfloat16
    errors = [(found.double() - exact).square().mean().sqrt().item() for found in (eager, ours)]
    assert errors[1] < 1.2 * errors[0] < 0.01


FRESH_PAGES = """
import resource, sys, torch
from sidgraft.memory import keep_freed_memory
def pages_of_ten():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.zeros(16 * 1024 * 1024)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
if sys.argv[1] == "keep":
    keep_freed_memory()
pages_of_ten()
print(pages_of_ten())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator is glibc's")
def test_memory_that_was_freed_is_used_again_without_new_pages():
    """In a process of its own: which free memory is taken depends on all that this one has freed before.

    The first ten do not count: glibc cuts an aligned tensor from a larger block, and what it cuts off lies between one
    tensor and the next until it holds seven such pieces (its cache of freed small ones), so up to seven are fresh.
    """
    found = {
        how: int(subprocess.run([sys.executable, "-c", FRESH_PAGES, how], capture_output=True, check=True).stdout)
        for how in ("keep", "return")
    }
    assert found["keep"] < 100 < found["return"]  # 64 MB are 16384 pages, or 32 large ones
