"""Give new and changed items Semantic IDs by a published quantizer. Run: sidgraft extend --help.

Shapes: N items · L semantic levels · D width of the embeddings · d of what is quantized.
"""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pyarrow as pa

from sidgraft import artifacts, continuity, drift, quality, quantizers
from sidgraft.bundles import COMPARED, differences, item_digests, open_version, other_encoder, other_settings
from sidgraft.continuity import Issued
from sidgraft.embeddings import check_made_from, vectors_array
from sidgraft.progress import say
from sidgraft.quantizers import Quantizer
from sidgraft.sequences import check_same_items
from sidgraft.vectors import in_memory

DEFINITIONS = {
    "relative_squared_error_encoded": "relative squared error of the items that were encoded now, new and changed ones",
    "relative_squared_error_at_fit": "relative squared error of the items that the quantizer was fitted on, then",
}


def extend(catalog: str, item_embeddings: str, previous: str, out: str) -> dict[str, Any]:
    """Give new and changed items Semantic IDs by the quantizer of a published version; all other items keep theirs.

    Args:
        catalog: Directory of the catalog artifact.
        item_embeddings: Directory of the item_embeddings artifact of this catalog, by the version's own encoder.
        previous: The published version to go on from, such as BUNDLES/versions/v-0123456789ab, local or s3://.
        out: Directory to write the semantic_ids artifact to.

    Raises:
        ValueError: When the embeddings are not the quantizer's or not of this catalog, and when more items share their
            codes than the deduplication codes tell apart.
    """
    inputs = {
        "catalog": artifacts.load(catalog, "catalog/v1"),
        "item_embeddings": artifacts.load(item_embeddings, "item_embeddings/v1"),
    }
    bundle = open_version(previous)
    now = inputs["catalog"].read_table("catalog.parquet", columns=list(COMPARED))
    vectors = inputs["item_embeddings"].read_table("embeddings.parquet")
    check_same_items(now, vectors)
    check_made_from(inputs["item_embeddings"], inputs["catalog"])
    if other := other_encoder(bundle, inputs["item_embeddings"]):
        raise ValueError(f"{other} Embed with that encoder, or give all items new codes with `sidgraft quantize`.")
    last = bundle.part("semantic_ids")
    quantizer, issued = quantizers.load(last), Issued.read(last)

    item_ids = vectors["item_id"].to_pylist()
    names = differences(bundle.items(), item_digests(now))
    differs = {*names["new"], *names["changed"]}
    differs_N = np.asarray([item in differs for item in item_ids])
    rows = np.flatnonzero(differs_N).tolist()
    vectors_ND = vectors_array(vectors)
    same_space = drift.encoded_as_before(issued, quantizer, item_ids, ~differs_N, in_memory(vectors_ND))
    if not same_space.passed:
        raise ValueError(
            f"the {same_space.sentence()}. {other_settings(bundle, inputs['item_embeddings'])} Embed as for that"
            " version, or give all items new codes with `sidgraft quantize`."
        )
    codes_NL = quantizer.encode(vectors_ND[rows])
    codes = continuity.extended(issued, item_ids, {item_ids[r]: c for r, c in zip(rows, codes_NL, strict=True)})
    _check_room(codes, quantizer.sizes)
    lost = continuity.retired(issued, item_ids, codes)

    description = last.read_json(quantizers.DESCRIPTION)
    figures = _figures(quantizer, vectors_ND, codes, rows, description)
    with artifacts.create(
        out, "semantic_ids/v1", stage="extend", arguments={"previous": bundle.version}, inputs=inputs
    ) as draft:
        lists = pa.array(codes.tolist(), pa.list_(pa.int32()))
        draft.write_table("semantic_ids.parquet", pa.table({"item_id": vectors["item_id"], "codes": lists}))
        draft.write_table(continuity.RETIRED, lost)
        shutil.copy(last.path / quantizers.CODEBOOKS, draft.path)
        draft.write_json(quantizers.DESCRIPTION, description)
        kept = [[True] * size for size in quantizer.sizes[:-1]]
        draft.write_json(continuity.FILE, {"version": bundle.version, "kept": kept})
        draft.write_json("quality.json", figures | {"definitions": quality.DEFINITIONS | DEFINITIONS})
        draft.metadata.update(quality.summary(figures, items=len(item_ids), dim=quantizer.dim))
        draft.metadata.update(encoded=len(rows), kept=len(item_ids) - len(rows), retired=lost.num_rows)
    say(f"extend: {len(rows):,} items are encoded, {len(item_ids) - len(rows):,} keep their Semantic IDs.")
    return dict(draft.metadata)


def _figures(
    quantizer: Quantizer, vectors_ND: np.ndarray, codes: np.ndarray, rows: list[int], described: dict[str, Any]
) -> dict[str, Any]:
    """The figures that `quantize` records, of the whole catalog as it is now, and what DEFINITIONS has beside them.

    ``rows`` are those of the items that were encoded now, ``described`` is the description of the quantizer.
    """
    codes_NL, reduced_Nd = codes[:, :-1], quantizer.reduced(vectors_ND)
    decoded_Nd = quantizer.decode(codes_NL)
    error = quality.relative_squared_error(reduced_Nd, decoded_Nd)
    kept = quality.neighbours_kept(vectors_ND, reduced_Nd, decoded_Nd, codes_NL, described["settings"]["seed"])
    figures = quality.quality(codes, quantizer.lengths(reduced_Nd, codes_NL), quantizer.sizes, error, kept)
    # Counted, because the deduplication codes of items that are gone are missing from those that are left.
    shared = np.unique(codes_NL, axis=0, return_counts=True)[1]
    figures |= {"collision_rate": drift.collision_rate(codes_NL), "largest_bucket": int(shared.max())}
    figures["relative_squared_error_at_fit"] = described["at_fit"]["relative_squared_error"]
    if rows:
        figures["relative_squared_error_encoded"] = quality.relative_squared_error(reduced_Nd[rows], decoded_Nd[rows])
    return figures


def _check_room(codes: np.ndarray, sizes: list[int]) -> None:
    """Raise ValueError where a deduplication code is beyond its level."""
    if codes[:, -1].max() >= sizes[-1]:
        shared = codes[codes[:, -1].argmax(), :-1].tolist()
        raise ValueError(
            f"{codes[:, -1].max() + 1} items have or had the codes {shared}, but the published quantizer tells only"
            f" {sizes[-1]} apart: give all items new codes with `sidgraft quantize` (retrain with watch_force=full),"
            " and a larger dedup_size where that is too small, too."
        )
