"""Plain text to token ids: whatever an item's text looks like, it never becomes a control or added token."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer


def plain_text_encoder(tokenizer: Any) -> Callable[[list[str]], list[list[int]]]:
    """Return a function that encodes texts with the tokenizer's own vocabulary but without its added tokens.

    The backend is copied with its added tokens, post-processor, truncation and padding taken out, so that
    ``<|im_end|>`` or ``<s_a_1>`` in a text comes out as the characters it is made of. Where the vocabulary
    itself yields an added or special id (some keep theirs in the base vocabulary), that id is dropped. The
    function takes a list of texts and returns one list of ids a text, without special tokens, untruncated.
    Raises ValueError for a tokenizer without a `tokenizers` backend.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"the tokenizer {type(tokenizer).__name__} has no backend of the tokenizers library: give a base model"
            " with a fast tokenizer (a tokenizer.json)."
        )
    description = json.loads(backend.to_str())
    description.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
    plain = Tokenizer.from_str(json.dumps(description))
    control = frozenset(tokenizer.added_tokens_decoder) | frozenset(tokenizer.all_special_ids)

    def encode(texts: list[str]) -> list[list[int]]:
        ids = [encoding.ids for encoding in plain.encode_batch_fast(texts, add_special_tokens=False)]
        return [i if control.isdisjoint(i) else [token for token in i if token not in control] for i in ids]

    return encode
