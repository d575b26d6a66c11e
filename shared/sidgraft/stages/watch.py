"""Compare the catalog with the published bundle: does it need a new training? Run: sidgraft watch --help."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa

from sidgraft import artifacts, checks, continuity, drift, quantizers
from sidgraft.artifacts import Artifact
from sidgraft.bundles import (
    COMPARED,
    Bundle,
    catalog_digest,
    differences,
    item_digests,
    latest_version,
    open_bundle,
    other_encoder,
    other_settings,
    refusal,
    version_uri,
)
from sidgraft.catalog import item_categories
from sidgraft.continuity import Issued
from sidgraft.embeddings import FILE, check_made_from, in_item_order
from sidgraft.gate import Check, table, write_decision
from sidgraft.progress import say
from sidgraft.sequences import check_same_items

EXAMPLES = 10
FORCES = ("none", "full", "anew")
CHANGED = "changed share"


def watch(
    catalog: str,
    item_embeddings: str,
    bundles: str,
    out: str,
    *,
    max_changed_share: float = 0.2,
    max_error_ratio: float = 2.0,
    max_collision_rise: float = 0.1,
    max_category_shift: float = 0.1,
    force: str = "none",
) -> dict[str, Any]:
    """Compare the catalog, row by row, with the one of the latest bundle: train nothing, an increment, or all items.

    An item is compared by its text, title, brand, category and description. Embeddings are read in batches: held are
    the vectors of new and changed items, and of 10,000 others at most, which tell whether the encoder is that of the
    bundle; none where too many items have changed for an increment. A catalog that `publish` has refused is not
    trained again while it and the latest bundle stay as they were.

    Args:
        catalog: Directory of the catalog artifact.
        item_embeddings: Directory of the item_embeddings artifact of this catalog.
        bundles: Folder of all published versions, local or s3://, with the pointer latest.json.
        out: Directory to write the decision artifact to.
        max_changed_share: Largest share of the catalog that may be new or have another text, for an increment.
        max_error_ratio: Largest quantization error of new and changed items, in multiples of that of the items which
            the quantizer was fitted on; by the first code, from its centroid.
        max_collision_rise: How far the share of items that share their semantic codes with another may lie above that
            share at the fit, for an increment. As many new items as max_changed_share allows by default, of the same
            kind as the others, raise it by at most 0.08; more than 0.1 means that they crowd into few codes, or that
            increments have filled the codes since.
        max_category_shift: Largest total variation distance between the mixes of categories, from 0 to 1.
        force: none decides by the catalog. full trains with all items, whatever has changed or was refused; anew does
            so, too, and goes on from nothing published: from the base model, as after a change of that model or of the
            levels.
    """
    settings = {
        "max_changed_share": max_changed_share,
        "max_error_ratio": max_error_ratio,
        "max_collision_rise": max_collision_rise,
        "max_category_shift": max_category_shift,
    }
    checks.not_negative(**settings)
    checks.one_of("force", force, FORCES)
    arguments = settings | {"force": force}
    inputs = {
        "catalog": artifacts.load(catalog, "catalog/v1"),
        "item_embeddings": artifacts.load(item_embeddings, "item_embeddings/v1"),
    }
    now = inputs["catalog"].read_table("catalog.parquet", columns=list(COMPARED))
    check_same_items(now, inputs["item_embeddings"].read_table(FILE, columns=["item_id"]))
    check_made_from(inputs["item_embeddings"], inputs["catalog"])
    digests = item_digests(now)
    version = latest_version(bundles)
    facts = {"version": version, "catalog_digest": catalog_digest(digests), "items": now.num_rows}
    limits: list[Check] = []
    names: dict[str, list[str]] = {"new": [], "changed": [], "relabelled": [], "gone": []}
    if not version:
        decision, reasons = "full", ["Nothing is published yet."]
    else:
        bundle = open_bundle(bundles)
        inputs["bundle"] = bundle.bundle
        names = differences(bundle.items(), digests)
        if other := other_encoder(bundle, inputs["item_embeddings"]):
            decision, reasons = "full", [other]
        elif "collision_rate" not in _at_fit(bundle):
            decision, reasons = "full", ["The published quantizer does not say what its figures were at the fit."]
        else:
            limits = _limits(bundle, now, inputs["item_embeddings"], names, settings)
            remarks = {
                CHANGED: "Other limits are not looked at.",
                drift.ENCODED_AGAIN: other_settings(bundle, inputs["item_embeddings"]),
            }
            decision, reasons = _decide(names, limits, remarks)
        if force != "none":
            decision, reasons = "full", [f"It was asked for: force={force}.", *reasons]
    if decision != "none" and force == "none" and (refused := refusal(bundles, facts["catalog_digest"], version)):
        decision, reasons = "none", [refused, *reasons]
    facts["bundle"] = version_uri(bundles, version) if version and force != "anew" else ""
    facts |= {f"{name}_items": len(ids) for name, ids in names.items()}
    say(f"watch: {decision}. {reasons[0]}")
    with artifacts.create(out, "decision/v1", stage="watch", arguments=arguments, inputs=inputs) as draft:
        body = {"decision": decision, "reasons": reasons, **facts}
        body |= {"checks": [vars(check) | {"passed": check.passed} for check in limits]}
        write_decision(draft, f"Retraining: {decision}", body, _details(limits, names))
        schema = pa.schema([("item_id", pa.string()), ("change", pa.string())])
        columns = [[item for ids in names.values() for item in ids], [name for name, ids in names.items() for _ in ids]]
        draft.write_table("changes.parquet", pa.table(columns, schema))
        draft.metadata.update(facts, decision=decision)
        return dict(draft.metadata)


def _at_fit(bundle: Bundle) -> dict[str, float]:
    """What `quantize` measured when it fitted the bundle's quantizer, however many increments have come since."""
    return bundle.part("semantic_ids").read_json(quantizers.DESCRIPTION).get("at_fit", {})


def _limits(
    bundle: Bundle, now: pa.Table, item_embeddings: Artifact, names: dict[str, list[str]], settings: dict[str, float]
) -> list[Check]:
    """How far the catalog has moved, with the Semantic IDs that an increment would give.

    The changed share alone where it is beyond its limit: that decides, and the vectors of what changed, nearly all of a
    catalog perhaps, need not be held.
    """
    differs = {*names["new"], *names["changed"]}
    changed = Check(CHANGED, len(differs) / now.num_rows, most=settings["max_changed_share"])
    if not changed.passed:
        return [changed]
    sorted_ids, _, vectors = in_item_order(item_embeddings)
    item_ids = sorted_ids.to_pylist()
    ids = bundle.part("semantic_ids")
    quantizer, issued, at_fit = quantizers.load(ids), Issued.read(ids), _at_fit(bundle)
    differs_N = np.asarray([item in differs for item in item_ids])
    others_ND = vectors.take(np.flatnonzero(differs_N))
    encoded = quantizer.encode(others_ND)
    others = dict(zip((item for item in item_ids if item in differs), encoded, strict=True))
    codes = continuity.extended(issued, item_ids, others)
    before = bundle.bundle.read_json("catalog.json")
    # Of a version that does not name its level both mixes are by the first level that tells items apart.
    categories = Counter(category or "" for category in item_categories(now, before.get("level")))
    first_Kd = quantizer.centroids[0]
    errors = drift.error_ratio(quantizer.reduced(others_ND), first_Kd, encoded[:, 0], at_fit["first_code_error"])
    shift = drift.category_shift(before["categories"], categories)
    collisions, collisions_then = drift.collision_rate(codes[:, :-1]), at_fit["collision_rate"]
    most_collisions = collisions_then + settings["max_collision_rise"]
    return [
        drift.encoded_as_before(issued, quantizer, item_ids, ~differs_N, vectors),
        changed,
        Check("error ratio", errors, most=settings["max_error_ratio"]),
        Check(f"collision rate (at the fit: {collisions_then:.4f})", collisions, most=most_collisions),
        Check("category shift", shift, most=settings["max_category_shift"]),
        Check("number of items with the same codes", int(codes[:, -1].max()) + 1, most=quantizer.sizes[-1]),
    ]


def _decide(names: dict[str, list[str]], limits: list[Check], remarks: dict[str, str]) -> tuple[str, list[str]]:
    """The decision and its reasons; the limits come first, because a mix may move while no row's text does.

    ``remarks`` has what there is to say beside a check that is not passed, by its name.
    """
    new, changed, relabelled, gone = (len(names[name]) for name in ("new", "changed", "relabelled", "gone"))
    counts = f"{new} items are new, {changed} have another text, {gone} are gone."
    if relabelled:
        counts += f" {relabelled} have the same text and another title, brand, category or description."
    failed = [check for check in limits if not check.passed]
    beyond = [f"The {check.sentence()}. {remarks.get(check.name, '')}".rstrip() for check in failed]
    if beyond:
        return "full", [*beyond, counts]
    if new or changed or relabelled:
        return "incremental", [counts]
    if gone:
        return "none", [f"{counts} `sidgraft recommend --offered` leaves items out that are gone."]
    return "none", ["The catalog is the one that the published bundle was trained on."]


def _details(limits: list[Check], names: dict[str, list[str]]) -> list[str]:
    shown = [
        f"- {name}: {', '.join(map(_quoted, ids[:EXAMPLES]))}{', …' if len(ids) > EXAMPLES else ''}"
        for name, ids in names.items()
        if ids
    ]
    return [*(table(limits) if limits else []), "", *shown]


def _quoted(item_id: str) -> str:
    """An item id as Markdown shows it, whatever it holds."""
    return "`" + item_id.replace("`", "'").replace("\n", " ") + "`"
