"""The new tokens: their order, their ids, their file."""

import json

import numpy as np
import pyarrow as pa
import pytest

from sidgraft import sids
from sidgraft.sids import SidVocabulary


def test_tokens_stand_level_by_level_then_the_delimiters():
    assert sids.token_texts([2, 1, 3]) == [
        "<s_a_0>", "<s_a_1>", "<s_b_0>", "<s_c_0>", "<s_c_1>", "<s_c_2>", "<|sid_begin|>", "<|sid_end|>",
    ]  # fmt: skip
    assert len(sids.token_texts([256] * 4)) == 1026
    with pytest.raises(ValueError, match="use fewer levels"):
        sids.token_texts([1] * 27)


def test_ids_of_codes_delimiters_and_items():
    vocabulary = SidVocabulary((2, 1, 3), 100)
    assert (vocabulary.levels, vocabulary.n_new) == (3, 8)
    assert vocabulary.level_first_ids == [100, 102, 103]
    assert (vocabulary.begin_id, vocabulary.end_id) == (106, 107)
    assert [vocabulary.level_rows(level) for level in range(3)] == [slice(0, 2), slice(2, 3), slice(3, 6)]
    codes = np.array([[1, 0, 2], [0, 0, 0]])
    assert vocabulary.item_tokens(codes).tolist() == [[106, 101, 102, 105, 107], [106, 100, 102, 103, 107]]


def test_the_file_names_every_token_and_loads_again(tmp_path):
    vocabulary = SidVocabulary((2, 3), 7)
    vocabulary.save(tmp_path)
    assert SidVocabulary.load(tmp_path) == vocabulary
    tokens = json.loads((tmp_path / "sid_vocabulary.json").read_text())["tokens"]
    assert [t["id"] for t in tokens] == list(range(7, 14))
    assert tokens[3] == {"token": "<s_b_1>", "id": 10, "level": 1, "code": 1}
    assert tokens[-1] == {"token": "<|sid_end|>", "id": 13, "level": None, "code": None}


def test_codes_array_reads_slices_and_chunks():
    lists = pa.array([[0, 1], [2, 3], [4, 5]], pa.list_(pa.int32()))
    table = pa.table({"codes": pa.chunked_array([lists[1:], lists[:1]])})
    assert sids.codes_array(table).tolist() == [[2, 3], [4, 5], [0, 1]]
