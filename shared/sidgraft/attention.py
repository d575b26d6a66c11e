"""Attention for packed rows and for beams, as an attention function of transformers' models (`check_supported`).

A packed row holds several sequences end to end, without padding, so that every linear layer works on real tokens only,
and what sequences begin with alike (a chat template, the wording of a task) stands in it once: in a causal model a
token's states follow from the tokens up to it alone. Only attention itself is per sequence: here the row is laid out as
a padded batch, attended causally (padding stands behind each sequence, so no mask is needed unless a layer looks back
fewer tokens than a sequence has) and laid back. During decoding all beams of a history attend to one copy of its keys
and values. While rows are grounded, the tokens before a sequence's first new one depend on nothing that trains: they
run once without gradients, and the rest attends to their keys and values.

Shapes: T tokens of all sequences · U tokens of the packed row, U <= T · B sequences · S longest sequence · G beams ·
H heads · d head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "sidgraft_packed"
# What scales or caps attention's scores or the logits, by its name in a model's configuration: losses and scores here
# are formed from hidden states and the head's weights alone, and attention without caps.
UNSUPPORTED = (
    "attn_logit_softcapping", "final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier",
)  # fmt: skip
# Types of models whose window is in the mask that they build, of which nothing is left here: they do not tell it to the
# attention function.
WINDOW_IN_MASK = ("doge", "phimoe", "qwen2_moe")
SHORT = 512  # tokens up to which, on a CPU, plain products are faster than the fused kernel


@dataclass(frozen=True)
class Packing:
    """How sequences lie in a packed row and in a padded batch [B * S]."""

    lengths_B: torch.Tensor
    padded_T: torch.Tensor  # where token t of the sequences stands in the padded batch
    batch: int
    longest: int
    row_T: torch.Tensor | None = None  # which token of the row it is; None: the row holds every token by itself
    first_U: torch.Tensor | None = None  # the first t for which a token of the row stands

    @staticmethod
    def of(lengths: list[int], device: torch.device | str = "cpu") -> Packing:
        """The packing of sequences with these lengths, in this order, that share nothing."""
        longest = max(lengths)
        padded_T = torch.cat([torch.arange(n) + b * longest for b, n in enumerate(lengths)])
        return Packing(torch.tensor(lengths, device=device), padded_T.to(device), len(lengths), longest)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Packing:
        """The same packing on another device; data loaders move batches by this method."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Packing:
        """The same packing in memory that a GPU copies from by itself; data loaders pin batches by this method."""
        return self._with(torch.Tensor.pin_memory)

    def _with(self, moved: Callable[[torch.Tensor], torch.Tensor]) -> Packing:
        parts = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **{name: moved(tensor) for name, tensor in parts.items()})

    @property
    def places_U(self) -> torch.Tensor:
        """Where each token of the row stands in the padded batch, first of the places that share it."""
        return self.padded_T if self.first_U is None else self.padded_T[self.first_U]

    @property
    def positions_1U(self) -> torch.Tensor:
        """Position of each token of the row in its own sequence, [1, U]."""
        return (self.places_U % self.longest).unsqueeze(0)

    def rows(self, at: torch.Tensor) -> torch.Tensor:
        """Where in the row tokens stand that are given by their number among the T of all sequences."""
        return at if self.row_T is None else self.row_T[at]

    def spread(self, packed_1HUd: torch.Tensor) -> torch.Tensor:
        """A packed tensor [1, H, U, d] as [T, H, d]: what sequences share is written out for each.

        The gradients of copies are added up in float32 at least and, unlike those of plain indexing, in a fixed order.
        """
        rows_UHd = packed_1HUd[0].transpose(0, 1)
        if self.row_T is None:
            return rows_UHd
        if not rows_UHd.requires_grad:
            return rows_UHd[self.row_T]
        wide = torch.promote_types(rows_UHd.dtype, torch.float32)
        return embedding(self.row_T, rows_UHd.flatten(1).to(wide)).to(rows_UHd.dtype).view(-1, *rows_UHd.shape[1:])

    def pad(self, packed_1HUd: torch.Tensor) -> torch.Tensor:
        """Lay a packed tensor [1, H, U, d] out as [B, H, S, d], zeros behind each sequence."""
        rows_THd = self.spread(packed_1HUd)
        padded = rows_THd.new_zeros(self.batch * self.longest, *rows_THd.shape[1:])
        # index_copy, because its gradient is a plain gather
        padded = padded.index_copy(0, self.padded_T, rows_THd)
        return padded.view(self.batch, self.longest, *rows_THd.shape[1:]).transpose(1, 2)

    def unpad(self, padded_BHSd: torch.Tensor) -> torch.Tensor:
        """The inverse of `pad`, with heads behind tokens as transformers wants them: [1, U, H, d]."""
        flat = padded_BHSd.transpose(1, 2).reshape(self.batch * self.longest, *padded_BHSd.shape[1::2])
        return flat.index_select(0, self.places_U).unsqueeze(0)

    def part(self, mask_T: torch.Tensor, lengths: list[int]) -> Packing:
        """The packing of the tokens in the mask, ``lengths`` of each sequence; what is shared is in it for all."""
        part = Packing.of(lengths, self.padded_T.device)
        if self.row_T is None or self.first_U is None:
            return part
        kept_U = mask_T[self.first_U]
        row_T = (kept_U.cumsum(0) - 1)[self.row_T[mask_T]]
        return replace(part, row_T=row_T, first_U=(mask_T.cumsum(0) - 1)[self.first_U[kept_U]])


def pack_sequences(sequences: list[np.ndarray], alone_T: np.ndarray | None = None) -> tuple[torch.Tensor, Packing]:
    """A packed row [1, U] of sequences of token ids, none of them empty, and its packing.

    What sequences begin with alike stands in the row once; tokens marked in ``alone_T``, which are numbered through
    all sequences, have a place of their own in any case.
    """
    packing, ids_T = Packing.of([len(s) for s in sequences]), np.concatenate(sequences)
    row_T, first_U = shared_beginnings(sequences, np.zeros(len(ids_T), bool) if alone_T is None else alone_T)
    if len(first_U) < len(row_T):
        packing = replace(packing, row_T=torch.from_numpy(row_T), first_U=torch.from_numpy(first_U))
        ids_T = ids_T[first_U]
    return torch.from_numpy(ids_T).long().unsqueeze(0), packing


def shared_beginnings(sequences: list[np.ndarray], alone_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``row_T`` and ``first_U`` of a `Packing` for `pack_sequences`."""
    lengths_B = np.array([len(s) for s in sequences])
    places_S = np.arange(lengths_B.max())
    inside_BS = places_S < lengths_B[:, None]
    ids_BS = np.full(inside_BS.shape, -1, np.int64)
    ids_BS[inside_BS] = np.concatenate(sequences)
    # Rows in order: a row has a beginning in common with any row above, if it has it with the one right above.
    order_B = np.lexsort(ids_BS.T[::-1])
    new_BS = np.ones(ids_BS.shape, bool)
    new_BS[1:] = np.logical_or.accumulate(ids_BS[order_B[1:]] != ids_BS[order_B[:-1]], axis=1)
    from_BS = np.empty(ids_BS.shape, np.int64)
    from_BS[order_B] = order_B[np.maximum.accumulate(np.where(new_BS, np.arange(len(order_B))[:, None], 0), axis=0)]
    starts_B = lengths_B.cumsum() - lengths_B
    same_T = (starts_B[from_BS] + places_S)[inside_BS]  # a token that is the same as token t
    own_T = np.arange(len(same_T))
    least_T = own_T.copy()
    np.minimum.at(least_T, same_T, own_T)  # of those that are the same, the first
    same_T = np.where(alone_T, own_T, least_T[same_T])
    first_U = np.flatnonzero(same_T == own_T)
    return np.searchsorted(first_U, same_T), first_U


@dataclass
class BeamCache:
    """Keys and values of a decoding batch: one copy of each prompt, and each beam's own tokens, per layer."""

    packing: Packing
    prompt_k: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> [B, H, S, d]
    prompt_v: dict[int, torch.Tensor] = field(default_factory=dict)
    beam_k: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> [B, H, G, tokens so far, d]
    beam_v: dict[int, torch.Tensor] = field(default_factory=dict)

    def follow(self, parent_BG: torch.Tensor) -> None:
        """Make beam g continue beam parent_BG[:, g]."""
        for cache in (self.beam_k, self.beam_v):
            for layer, states in cache.items():
                index = parent_BG[:, None, :, None, None].expand(-1, states.shape[1], -1, *states.shape[3:])
                cache[layer] = states.gather(2, index)

    def extend(self, layer: int, key_BHGd: torch.Tensor, value_BHGd: torch.Tensor) -> None:
        """Append one token to every beam."""
        for cache, new in ((self.beam_k, key_BHGd), (self.beam_v, value_BHGd)):
            new = new.unsqueeze(3)
            cache[layer] = torch.cat([cache[layer], new], dim=3) if layer in cache else new

    def hidden_prompt(self, own: int, window: int | None) -> torch.Tensor:
        """[B, 1, 1, S]: where the newest of a beam's ``own`` tokens does not look: padding, and too far back."""
        places_S = torch.arange(self.packing.longest, device=self.packing.lengths_B.device)
        lengths_B1 = self.packing.lengths_B[:, None]
        hidden_BS = places_S >= lengths_B1
        if window is not None:
            hidden_BS |= places_S < lengths_B1 + own - window
        return hidden_BS[:, None, None]


@dataclass
class Prefix:
    """Keys and values of the first tokens of each sequence, kept by one forward for the rest of the sequences.

    ``first`` and ``rest`` say how the two parts lie in their packed rows; together they make up ``whole``.
    """

    whole: Packing
    first: Packing
    rest: Packing
    keys: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> packed, [1, H, U_first, d]
    values: dict[int, torch.Tensor] = field(default_factory=dict)

    @staticmethod
    def of(whole: Packing, first_T: torch.Tensor) -> Prefix:
        """Cut the sequences of ``whole`` behind the tokens in the mask, which are the first ones of each."""
        first_B = torch.bincount((whole.padded_T // whole.longest)[first_T], minlength=whole.batch)
        first, rest = first_B.tolist(), (whole.lengths_B - first_B).tolist()
        return Prefix(whole, whole.part(first_T, first), whole.part(~first_T, rest))

    def places(self, part: Packing, offset_B: torch.Tensor | None = None) -> torch.Tensor:
        """Where each token of a part stands in the padded batch of whole sequences [B * S], given its offset."""
        sequence_T = part.padded_T // part.longest
        position_T = part.padded_T % part.longest
        if offset_B is not None:
            position_T = position_T + offset_B[sequence_T]
        return sequence_T * self.whole.longest + position_T

    def join(self, first: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        """Lay the two parts of keys or values out as whole sequences: [B, H, S, d], zeros behind each."""
        padded = rest.new_zeros(self.whole.batch * self.whole.longest, rest.shape[1], rest.shape[3])
        padded = padded.index_copy(0, self.places(self.first), self.first.spread(first))
        padded = padded.index_copy(0, self.places(self.rest, self.first.lengths_B), self.rest.spread(rest))
        return padded.view(self.whole.batch, self.whole.longest, *padded.shape[1:]).transpose(1, 2)

    def mask(self, window: int | None) -> torch.Tensor:
        """Which places of the whole sequence each token of the rest looks at: [B, 1, S_rest, S]."""
        own_R = torch.arange(self.rest.longest, device=self.whole.lengths_B.device)
        # Padding behind the rest looks at something, too: rows of nothing but -inf would make gradients NaN.
        position_BR = (self.first.lengths_B[:, None] + own_R).clamp(max=self.whole.longest - 1)
        return _seen(position_BR, self.whole.longest, window)[:, None]


def _seen(position_BR: torch.Tensor, longest: int, window: int | None) -> torch.Tensor:
    """Which of the first ``longest`` tokens each position looks at, [B, R, S]: up to itself, of these ``window``."""
    places_S, position_BR1 = torch.arange(longest, device=position_BR.device), position_BR[..., None]
    seen_BRS = places_S <= position_BR1
    return seen_BRS if window is None else seen_BRS & (places_S > position_BR1 - window)


def check_supported(config: Any) -> None:
    """Raise ValueError where a model's configuration asks for what attention, losses and scores here would leave out.

    That is scaled or capped scores or logits, attention in chunks, and a window that only the model's own mask knows.
    """
    config = config.get_text_config()
    asked = {name: getattr(config, name, None) for name in UNSUPPORTED}
    asked = [f"{name}={value}" for name, value in asked.items() if value not in (None, 1.0)]
    layers, window = getattr(config, "layer_types", None) or (), getattr(config, "sliding_window", None)
    if asked:
        what = f"scales or caps scores or logits by {', '.join(asked)}"
    elif "chunked_attention" in layers:
        what = "attends in chunks (layer_types names chunked_attention)"
    elif config.model_type in WINDOW_IN_MASK and window and (not layers or "sliding_attention" in layers):
        what = f"keeps its window (sliding_window={window}) in a mask of its own"
    else:
        return
    raise ValueError(
        f"the model ({config.model_type}) {what}, which is not supported: give a base model without, such as Qwen3,"
        " Llama, Mistral or Gemma 3."
    )


def use_packed_attention(model: Any) -> None:
    """Make a transformers model attend through this module; its forward then takes ``packing=`` or ``beams=``.

    Raises ValueError for a model that `check_supported` refuses.
    """
    check_supported(model.config)
    AttentionInterface.register(NAME, _attention)
    # None means that the model builds no mask at all: the packing says it all.
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    model.set_attn_implementation(NAME)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    packing: Packing | None = None,
    beams: BeamCache | None = None,
    prefix: Prefix | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Packed causal attention when ``packing`` is given (and fills ``beams``), one step of the beams otherwise.

    With ``prefix`` the forward over its first part fills it, and the one over the rest attends to both parts. A token
    looks at the last ``sliding_window`` tokens, itself included. Raises ValueError for attention of another kind.
    """
    if softcap is not None or s_aux is not None:
        raise ValueError(
            f"{type(module).__name__} computes its attention with {'sinks' if softcap is None else 'a soft cap'}, which"
            " packed rows do not: give a base model without, such as Qwen3, Llama, Mistral or Gemma 3."
        )
    if packing is None and beams is None:
        raise ValueError("this model attends to packed rows: its forward needs packing= or beams=.")
    if packing is None:
        assert beams is not None
        return _beam_step(module.layer_idx, beams, query, key, value, scaling, sliding_window), None
    layer, mask = module.layer_idx, None
    if prefix is None or packing is prefix.first:
        if prefix is not None:
            prefix.keys[layer], prefix.values[layer] = key, value
        key, value = packing.pad(key), packing.pad(value)
        if sliding_window is not None and packing.longest > sliding_window:
            places_1S = torch.arange(packing.longest, device=query.device)[None]
            mask = _seen(places_1S, packing.longest, sliding_window)[:, None]
    else:
        key, value = prefix.join(prefix.keys[layer], key), prefix.join(prefix.values[layer], value)
        mask = prefix.mask(sliding_window)
    if beams is not None:
        beams.prompt_k[layer], beams.prompt_v[layer] = key, value
    query = packing.pad(query)
    if query.device.type == "cpu" and key.shape[2] <= SHORT and not dropout:
        attended = _attend_by_products(query, key, value, mask, scaling)
    else:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        attended = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling
        )
    return packing.unpad(attended), None


def _attend_by_products(
    query_BHQd: torch.Tensor,
    key_BKSd: torch.Tensor,
    value_BKSd: torch.Tensor,
    mask_B1QS: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """Attention as two batched products and a softmax, causal where no mask is given; K key heads serve H heads.

    On a CPU the fused kernel is made for long sequences: at 130 tokens in bfloat16, its backward takes four times as
    long as this. The query heads of one key head lie one behind the other, so no key or value is copied.
    """
    B, H, Q, d = query_BHQd.shape
    K, S = key_BKSd.shape[1:3]
    if mask_B1QS is None:
        mask_B1QS = torch.ones(1, 1, Q, S, dtype=torch.bool).tril_()
    bias = torch.zeros(mask_B1QS.shape, dtype=query_BHQd.dtype).masked_fill_(~mask_B1QS, float("-inf"))
    query = (query_BHQd * scaling).reshape(B * K, -1, d)
    bias = bias.expand(B, K, Q, S).repeat(1, 1, H // K, 1).view(B * K, -1, S)
    scores = torch.baddbmm(bias, query, key_BKSd.reshape(B * K, S, d).transpose(1, 2))
    return torch.bmm(scores.softmax(-1), value_BKSd.reshape(B * K, S, d)).view(B, H, Q, d)


def _beam_step(
    layer: int,
    cache: BeamCache,
    query_BHGd: torch.Tensor,
    key_BHGd: torch.Tensor,
    value_BHGd: torch.Tensor,
    scaling: float,
    window: int | None,
) -> torch.Tensor:
    """Attend from the newest token of every beam to the shared prompt and to the beam's own tokens.

    Query heads of one key head are stacked behind each other, so the prompt's keys are read once for all of
    them and for all beams. Returns [B, G, H, d].
    """
    cache.extend(layer, key_BHGd, value_BHGd)
    prompt_k, prompt_v = cache.prompt_k[layer], cache.prompt_v[layer]
    own_k, own_v = cache.beam_k[layer], cache.beam_v[layer]
    B, heads, G, d = query_BHGd.shape
    kv_heads = prompt_k.shape[1]
    query = query_BHGd.reshape(B, kv_heads, -1, d) * scaling  # [B, kv, groups * G, d]
    own = own_k.shape[3]
    to_prompt = (query @ prompt_k.transpose(2, 3)).float()
    to_prompt = to_prompt.masked_fill(cache.hidden_prompt(own, window), float("-inf"))
    per_beam = query.view(B, kv_heads, heads // kv_heads, G, d)
    to_own = torch.einsum("bhrgd,bhgtd->bhrgt", per_beam, own_k).float()
    if window is not None:
        to_own[..., : max(own - window, 0)] = float("-inf")
    scores = torch.cat([to_prompt.view(*to_own.shape[:-1], -1), to_own], dim=-1)
    weights = scores.softmax(-1).to(query.dtype)
    prompt_part, own_part = weights.split([prompt_k.shape[2], own], dim=-1)
    attended = prompt_part.reshape(B, kv_heads, -1, prompt_k.shape[2]) @ prompt_v
    attended = attended.view(per_beam.shape) + torch.einsum("bhrgt,bhgtd->bhrgd", own_part, own_v)
    return attended.reshape(B, heads, G, d).transpose(1, 2)
