"""Diagnose the geometry of the new rows before and after each stage. Run: sidgraft diagnose --help.

Shapes: N items · L semantic levels · K codes of the level · S codes of all semantic levels · D model width ·
d codebook width · M text rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from sidgraft import artifacts, geometry, models, plots, quantizers
from sidgraft.artifacts import Artifact
from sidgraft.catalog import item_categories
from sidgraft.checks import positive
from sidgraft.devices import device
from sidgraft.histories import training_counts
from sidgraft.progress import track
from sidgraft.prompts import NextItem, QueryItem
from sidgraft.queries import Queries, read_queries
from sidgraft.sequences import Sequences, check_same_items, read_sequences
from sidgraft.sids import SidVocabulary, codes_array

INITIALIZATION, GROUNDING, FINE_TUNING = "initialization", "grounding", "fine-tuning"
DEPTHS = (1, 3, 5)  # q of R2_q
MOST_ROWS = 2048  # rows whose pairs are compared and drawn; of more, a sample
MOST_HISTORIES = 32  # some hundred positions are plenty for a mean, and take seconds on two cores
SMALLEST_CENTRED = "s_i > s_1 * max(K, D) * eps(float32)"
DEFINITIONS = {
    "rows": "input embedding rows; cosines and RSA on raw rows, everything else of one level on centred rows; the"
    " measures ending in _all are over all semantic levels, uncentred",
    "effective_rank": f"exp(-sum p_i ln p_i), p_i = s_i / sum s, singular values with {SMALLEST_CENTRED}",
    "rank": f"number of singular values with {SMALLEST_CENTRED}",
    "sigma_geo": f"geometric mean of the singular values with {SMALLEST_CENTRED}",
    "mean_cosine": "mean cosine over pairs of different rows",
    "mean_cosine_text": "mean cosine of the level's rows with a sample of text rows of the same model",
    "rsa": f"correlation over row pairs of their cosine with the cosine of their codebook vectors; a sample of"
    f" {MOST_ROWS} rows where there are more. For an RQ-VAE, whose codebooks live in a space of their own, a codebook"
    " vector is here and below the mean embedding of the code's items, as in centroid rows",
    "purity": "mean share of a code's nearest codes (L2) with its majority category; codes without one left out",
    "purity_random": "expectation of the purity with neighbours drawn at random",
    "purity_encoder": "purity of the codebook vectors",
    "r2": "share of the squared norm of the column-centred target in the top q left singular vectors of the rows;"
    " popularity: log(1 + n_k), semantic: one-hot majority category",
    "cosine_to_initialization": "mean cosine of a row with its own start, both minus the base vocabulary's mean",
    "cosine_to_centroids": "mean cosine of a row with its code's centroid row, both minus the base vocabulary's mean",
    "popularity_axis": "correlation of n_k with the projection of the centred output rows on the mean final hidden"
    " state of the fine-tuned model where it predicts the level's codes, on a sample of training histories. Theorem 3.1"
    " sums these means over all steps; the steps before the last leave none behind",
    "explained_variance": "share of the variance of log(1 + f_i) over items that lies between SID prefixes",
    "f_i, n_k": "training targets of an item, all positions of the training part; their sum over a code's items",
}


def diagnose(
    initial_rows: str,
    grounded_rows: str,
    model: str,
    semantic_ids: str,
    catalog: str,
    interactions: str,
    out: str,
    *,
    level: int = 0,
    neighbours: int = 10,
    text_rows: int = 256,
    variant: str = "",
    seed: int = 0,
) -> dict[str, Any]:
    """Compute spectra, RSA, purity, popularity and semantic alignment at initialization, grounding and fine-tuning.

    Args:
        initial_rows: Directory of the token_rows artifact from expand.
        grounded_rows: Directory of the token_rows artifact from ground.
        model: Directory of the model artifact from finetune.
        semantic_ids: Directory of the semantic_ids artifact.
        catalog: Directory of the catalog artifact.
        interactions: Directory of the interactions artifact.
        out: Directory to write the diagnostics artifact to.
        level: Level whose rows are diagnosed one by one (0 is the first).
        neighbours: Nearest codes that count for the neighbourhood purity.
        text_rows: Text rows sampled for the cosine of new rows with text rows.
        variant: Name of this variant in the tables.
        seed: Seed of the run, shown in the tables; also draws the samples.
    """
    positive(neighbours=neighbours, text_rows=text_rows)
    inputs = {
        "initial_rows": artifacts.load(initial_rows, "token_rows/v1"),
        "grounded_rows": artifacts.load(grounded_rows, "token_rows/v1"),
        "model": artifacts.load(model, "model/v1"),
        "semantic_ids": artifacts.load(semantic_ids, "semantic_ids/v1"),
        "catalog": artifacts.load(catalog, "catalog/v1"),
        "interactions": artifacts.load(interactions, "interactions/v1"),
    }
    vocabulary = _vocabulary(inputs, level)
    rng = np.random.default_rng(seed)
    items = _items(inputs)
    rows = _rows(inputs, vocabulary, level, items, text_rows, rng)
    codes = _codes(inputs["semantic_ids"], vocabulary, level, items, rng)
    purities = {
        "purity_random": geometry.random_purity(codes.categories_K),
        "purity_encoder": geometry.neighbourhood_purity(codes.vectors_Kd, codes.categories_K, neighbours),
    }
    stages = {name: _measures(name, rows, codes, neighbours, purities) for name in rows.of_level_KD}
    explained = geometry.explained_variance(items.codes_NL[:, :-1], items.counts_N)

    arguments = {"level": level, "neighbours": neighbours, "text_rows": text_rows, "variant": variant, "seed": seed}
    with artifacts.create(out, "diagnostics/v1", stage="diagnose", arguments=arguments, inputs=inputs) as draft:
        cosines = _cosines(rows, codes)
        for name in stages:
            draft.write_table(f"cosine_{name}.parquet", _matrix_table(codes.shown_K, cosines.of_level_KK[name]))
            draft.write_table(f"cosine_text_{name}.parquet", _matrix_table(codes.shown_K, cosines.with_texts_KM[name]))
        (draft.path / "figures").mkdir()
        _draw_rows(draft.path / "figures", rows, codes, cosines, stages, level)
        _draw_measures(draft.path / "figures", rows, codes, stages, explained, level, neighbours)
        draft.write_json(
            "diagnostics.json",
            {
                "variant": variant,
                "seed": seed,
                "level": level,
                "neighbours": neighbours,
                "stages": stages,
                "explained_variance": _by_depth(explained),
                "training": _training(inputs["grounded_rows"], inputs["model"]),
                "definitions": DEFINITIONS,
                "figures": _figures(level, neighbours),
            },
        )
        summary = _summary(stages)
        draft.metadata.update(summary, variant=variant, seed=seed)
    return summary


def _vocabulary(inputs: dict[str, Artifact], level: int) -> SidVocabulary:
    """The new tokens, after checking that all inputs speak of the same ones and that the level is a semantic one."""
    vocabulary = SidVocabulary.load(inputs["initial_rows"].path)
    for name in ("grounded_rows", "model"):
        found = SidVocabulary.load(inputs[name].path)
        if found != vocabulary:
            raise ValueError(
                f"{name} has codes {list(found.sizes)} from token id {found.first_id}, but initial_rows"
                f" {list(vocabulary.sizes)} from {vocabulary.first_id}: give artifacts of one run."
            )
    sizes = inputs["semantic_ids"].read_json("quantizer.json")["sizes"]
    if list(sizes) != list(vocabulary.sizes):
        raise ValueError(
            f"semantic_ids has codes {list(sizes)} by level, but initial_rows {list(vocabulary.sizes)}: give the"
            " semantic_ids that initial_rows were made from."
        )
    if not 0 <= level < vocabulary.levels - 1:
        raise ValueError(f"level is {level}, expected a semantic level, 0 to {vocabulary.levels - 2}.")
    return vocabulary


@dataclass(frozen=True)
class _Items:
    """The items, and what of them is trained on."""

    codes_NL: np.ndarray
    categories_N: list[str | None]
    counts_N: np.ndarray  # how often each is a training target
    trained_on: Sequences | Queries


def _items(inputs: dict[str, Artifact]) -> _Items:
    items = inputs["catalog"].read_table("catalog.parquet", columns=["item_id", "category"])
    sids = inputs["semantic_ids"].read_table("semantic_ids.parquet")
    check_same_items(items, sids)
    item_ids, interactions = items["item_id"].to_pylist(), inputs["interactions"]
    trained_on = read_queries(interactions, item_ids) or read_sequences(interactions, item_ids)
    counts_N = training_counts(interactions.read_table("interactions.parquet"), item_ids)
    return _Items(codes_array(sids), item_categories(items), counts_N, trained_on)


@dataclass(frozen=True)
class _Rows:
    """The new rows at the three points, by the point's name, float64, and what they are compared with."""

    of_level_KD: dict[str, np.ndarray]  # input rows
    of_all_SD: dict[str, np.ndarray]
    texts_MD: dict[str, np.ndarray]  # text rows of the same model
    projections_K: dict[str, np.ndarray]  # of the level's output rows on the popularity axis
    centroids_KD: np.ndarray | None  # the rows that initialization=centroid gives the level, where it can
    origin_D: np.ndarray  # the mean of the base vocabulary


def _rows(
    inputs: dict[str, Artifact],
    vocabulary: SidVocabulary,
    level: int,
    items: _Items,
    text_rows: int,
    rng: np.random.Generator,
) -> _Rows:
    """Read the rows at the three points, and sample text rows of the same models."""
    texts = _sample(vocabulary.first_id, text_rows, rng)
    initial = models.load_rows(inputs["initial_rows"])
    grounded = models.load_rows(inputs["grounded_rows"], _rows_epoch(inputs["model"]))
    base_MD, base_mean_D = _base_texts(inputs["initial_rows"], vocabulary, texts)
    tuned, tuned_MD, axis_D = _fine_tuned(inputs["model"], vocabulary, level, texts, items, rng)
    tensors = {INITIALIZATION: initial, GROUNDING: grounded, FINE_TUNING: tuned}
    input_ND = {name: _float64(t["rows"]) for name, t in tensors.items()}
    output_ND = {name: _float64(t.get("head_rows", t["rows"])) for name, t in tensors.items()}
    here = vocabulary.level_rows(level)
    return _Rows(
        of_level_KD={name: rows[here] for name, rows in input_ND.items()},
        of_all_SD={name: rows[: sum(vocabulary.sizes[:-1])] for name, rows in input_ND.items()},
        texts_MD={INITIALIZATION: base_MD, GROUNDING: base_MD, FINE_TUNING: tuned_MD},
        projections_K={name: geometry.axis_projection(rows[here], axis_D) for name, rows in output_ND.items()},
        centroids_KD=_float64(initial["centroid_rows"])[here] if "centroid_rows" in initial else None,
        origin_D=_float64(initial["mu"]) if "mu" in initial else base_mean_D,
    )


def _rows_epoch(model: Artifact) -> int:
    """The epoch of grounding whose rows the model was fine-tuned from."""
    return model.arguments.get("rows_epoch", models.LAST_EPOCH)


@dataclass(frozen=True)
class _Codes:
    """What the level's codes stand for, and which codes are shown where there are too many."""

    totals_K: np.ndarray  # training targets
    items_K: np.ndarray
    categories_K: list[str | None]  # of most of a code's items
    targets_KT: dict[str, np.ndarray]  # what leading directions may encode: popularity, categories; column-centred
    vectors_Kd: np.ndarray  # of the codebook
    vectors_Sd: np.ndarray
    shown_K: np.ndarray
    shown_S: np.ndarray
    ends_S: list[int]  # where the levels end among these


def _codes(
    semantic_ids: Artifact, vocabulary: SidVocabulary, level: int, items: _Items, rng: np.random.Generator
) -> _Codes:
    size, codes_N = vocabulary.sizes[level], items.codes_NL[:, level]
    totals_K = geometry.code_totals(codes_N, items.counts_N, size)
    categories_K = geometry.majority_categories(codes_N, items.categories_N, size)
    targets_KT = {
        "popularity": geometry.popularity_target(totals_K),
        "semantic": geometry.category_target(categories_K),
    }
    codebooks = [book.astype(np.float64) for book in quantizers.load(semantic_ids).centroids]
    shown_K = _sample(size, MOST_ROWS, rng)
    shown_S = _sample(sum(vocabulary.sizes[:-1]), MOST_ROWS, rng)
    return _Codes(
        totals_K=totals_K,
        items_K=geometry.code_totals(codes_N, np.ones(len(codes_N)), size),
        categories_K=categories_K,
        targets_KT=targets_KT,
        vectors_Kd=codebooks[level],
        vectors_Sd=np.concatenate(codebooks),
        shown_K=shown_K,
        shown_S=shown_S,
        ends_S=np.searchsorted(shown_S, np.cumsum(vocabulary.sizes[:-2])).tolist(),
    )


def _measures(
    name: str, rows: _Rows, codes: _Codes, neighbours: int, purities: dict[str, float | None]
) -> dict[str, Any]:
    """All measures of the rows at one point; ``purities`` are what their own purity stands beside."""
    rows_KD, rows_SD = rows.of_level_KD[name], rows.of_all_SD[name]
    spectrum = geometry.singular_values(geometry.centred(rows_KD))
    spectrum_all = geometry.singular_values(rows_SD)
    rsa = geometry.rsa(rows_KD[codes.shown_K], codes.vectors_Kd[codes.shown_K])
    rsa_all = geometry.rsa(rows_SD[codes.shown_S], codes.vectors_Sd[codes.shown_S])
    matched = partial(geometry.mean_matched_cosine, rows_KD, origin_D=rows.origin_D)
    return {
        "rank": geometry.rank(spectrum, rows_KD.shape),
        "effective_rank": geometry.effective_rank(spectrum, rows_KD.shape),
        "effective_rank_all": geometry.effective_rank(spectrum_all, rows_SD.shape),
        "sigma_geo": geometry.sigma_geo(spectrum, rows_KD.shape),
        "mean_cosine": geometry.mean_pairwise_cosine(rows_KD),
        "mean_cosine_all": geometry.mean_pairwise_cosine(rows_SD),
        "mean_cosine_text": geometry.mean_cosine(rows_KD, rows.texts_MD[name]),
        "rsa_pearson": rsa[0],
        "rsa_spearman": rsa[1],
        "rsa_pearson_all": rsa_all[0],
        "rsa_spearman_all": rsa_all[1],
        "purity": geometry.neighbourhood_purity(rows_KD, codes.categories_K, neighbours),
        **purities,
        "r2": {
            target: _by_depth(geometry.alignment(rows_KD, target_KT, DEPTHS))
            for target, target_KT in codes.targets_KT.items()
        },
        "cosine_to_initialization": matched(rows.of_level_KD[INITIALIZATION]),
        "cosine_to_centroids": None if rows.centroids_KD is None else matched(rows.centroids_KD),
        "popularity_axis_correlation": geometry.pearson(rows.projections_K[name], codes.totals_K),
        "popularity_axis_spearman": geometry.spearman(rows.projections_K[name], codes.totals_K),
        "spectrum": spectrum.tolist(),
        "spectrum_all": spectrum_all.tolist(),
    }


@dataclass(frozen=True)
class _Cosines:
    """Cosine matrices of the rows that are shown, by the point's name."""

    of_level_KK: dict[str, np.ndarray]
    of_all_SS: dict[str, np.ndarray]
    with_texts_KM: dict[str, np.ndarray]


def _cosines(rows: _Rows, codes: _Codes) -> _Cosines:
    of_level_KD = {name: rows_KD[codes.shown_K] for name, rows_KD in rows.of_level_KD.items()}
    of_all_SD = {name: rows_SD[codes.shown_S] for name, rows_SD in rows.of_all_SD.items()}
    return _Cosines(
        {name: geometry.cosine_matrix(rows_KD, rows_KD) for name, rows_KD in of_level_KD.items()},
        {name: geometry.cosine_matrix(rows_SD, rows_SD) for name, rows_SD in of_all_SD.items()},
        {name: geometry.cosine_matrix(rows_KD, rows.texts_MD[name]) for name, rows_KD in of_level_KD.items()},
    )


def _draw_rows(
    figures: Path, rows: _Rows, codes: _Codes, cosines: _Cosines, stages: dict[str, dict[str, Any]], level: int
) -> None:
    """Draw the rows themselves: their cosines, their spectra, their map."""
    order, bounds = plots.category_order([codes.categories_K[k] for k in codes.shown_K])
    plots.cosine_matrices(
        figures / "cosine.png",
        {name: matrix_KK[np.ix_(order, order)] for name, matrix_KK in cosines.of_level_KK.items()},
        cosines.of_all_SS,
        label=f"level {level}",
        bounds=bounds,
        all_bounds=codes.ends_S,
    )
    plots.spectra(
        figures / "spectra.png",
        {name: stage["spectrum"] for name, stage in stages.items()},
        {name: stage["spectrum_all"] for name, stage in stages.items()},
        label=f"level {level}",
    )
    plots.row_map(
        figures / "map.png",
        {name: geometry.principal_plane(rows.of_level_KD[name]) for name in (INITIALIZATION, FINE_TUNING)},
        codes.categories_K,
        np.log1p(codes.totals_K),
    )
    plots.text_cosines(figures / "text.png", cosines.with_texts_KM)


def _draw_measures(
    figures: Path,
    rows: _Rows,
    codes: _Codes,
    stages: dict[str, dict[str, Any]],
    explained: dict[int, float | None],
    level: int,
    neighbours: int,
) -> None:
    """Draw what the rows keep of the codebook, of categories and of popularity."""
    shown_K, last = codes.shown_K, stages[FINE_TUNING]
    vectors_Kd = codes.vectors_Kd[shown_K]
    plots.rsa(
        figures / "rsa.png",
        {name: geometry.pair_cosines(rows_KD[shown_K], vectors_Kd) for name, rows_KD in rows.of_level_KD.items()},
        {name: (stage["rsa_pearson"], stage["rsa_spearman"]) for name, stage in stages.items()},
    )
    plots.purity(
        figures / "purity.png",
        {name: stage["purity"] for name, stage in stages.items()},
        random=last["purity_random"],
        encoder=last["purity_encoder"],
        neighbours=neighbours,
    )
    plots.alignment(
        figures / "alignment.png",
        {name: stage["r2"]["popularity"] for name, stage in stages.items()},
        {name: stage["r2"]["semantic"] for name, stage in stages.items()},
    )
    label = f"level-{level}"
    plots.code_popularity(figures / "popularity.png", codes.totals_K, codes.items_K, explained, label=label)
    plots.popularity_axis(
        figures / "popularity_axis.png",
        rows.projections_K,
        codes.totals_K,
        {n: (s["popularity_axis_correlation"], s["popularity_axis_spearman"]) for n, s in stages.items()},
    )


def _base_texts(token_rows: Artifact, vocabulary: SidVocabulary, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the sampled text tokens in the base model [M, D], and the mean of all of its rows [D]."""
    base = models.BaseModel.load(token_rows.path)
    model, _ = models.load_base(base.name, revision=base.revision, trust_remote_code=base.trust_remote_code)
    rows_VD, _ = models.base_rows(model, vocabulary)
    return _float64(rows_VD[texts]), _float64(rows_VD.double().mean(dim=0))


def _fine_tuned(
    artifact: Artifact,
    vocabulary: SidVocabulary,
    level: int,
    texts: np.ndarray,
    items: _Items,
    rng: np.random.Generator,
) -> tuple[dict[str, torch.Tensor], np.ndarray, np.ndarray]:
    """The new rows of the fine-tuned model, its text rows [M, D] and the popularity axis [D]."""
    model, tokenizer, _ = models.load_model(artifact, torch.float32)
    rows_VD, _ = models.base_rows(model, vocabulary)
    sequences = _sequences(items, tokenizer, vocabulary, int(artifact.arguments["max_length"]), rng)
    axis_D = _mean_hidden_state(model, sequences, vocabulary, level)
    return models.take_rows(model, vocabulary), _float64(rows_VD[texts]), axis_D


def _sequences(
    items: _Items, tokenizer: Any, vocabulary: SidVocabulary, max_length: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Token ids of a sample of what the model was trained on: histories, or queries with an item that fits."""
    trained_on, tokens_NS = items.trained_on, vocabulary.item_tokens(items.codes_NL)
    if isinstance(trained_on, Sequences):
        next_item, histories = NextItem(tokenizer, vocabulary, max_length), trained_on.training()
        chosen = _sample(len(histories), MOST_HISTORIES, rng)
        return [next_item.sample(tokens_NS[histories[user]]).ids_S for user in chosen]
    fitting = QueryItem(tokenizer, vocabulary, max_length)
    query_P, item_P = trained_on.training_pairs()
    chosen = _sample(len(query_P), MOST_HISTORIES, rng)
    asked = fitting.texts([trained_on.prompts[query] for query in query_P[chosen]])
    return [fitting.sample(text, tokens_NS[item]).ids_S for text, item in zip(asked, item_P[chosen], strict=True)]


def _mean_hidden_state(model: Any, sequences: list[np.ndarray], vocabulary: SidVocabulary, level: int) -> np.ndarray:
    """Mean over the sequences of the final hidden state (what the head multiplies) one before each code of the level.

    Float64 [D]; zeros when no sequence holds such a code.
    """
    model = model.to(device()).eval()
    first = vocabulary.level_first_ids[level]
    total_D, count = np.zeros(model.config.hidden_size), 0
    for ids_S in track(sequences, "popularity axis", len(sequences), "histories"):
        at = np.flatnonzero((ids_S[1:] >= first) & (ids_S[1:] < first + vocabulary.sizes[level]))
        with torch.inference_mode():
            hidden_SD = model.get_decoder()(torch.from_numpy(ids_S)[None].to(device())).last_hidden_state[0]
        total_D += _float64(hidden_SD[at].double().sum(dim=0))
        count += len(at)
    return total_D / max(count, 1)


def _sample(count: int, most: int, rng: np.random.Generator) -> np.ndarray:
    """The numbers below ``count``, or a sample of ``most`` of them, in order."""
    return np.arange(count) if count <= most else np.sort(rng.choice(count, most, replace=False))


def _float64(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()


def _matrix_table(codes_K: np.ndarray, matrix_KM: np.ndarray) -> pa.Table:
    values = pa.array(matrix_KM.astype(np.float16).ravel(), pa.float16())
    rows = pa.FixedSizeListArray.from_arrays(values, matrix_KM.shape[1])
    return pa.table({"code": pa.array(codes_K, pa.int32()), "cosine": rows})


def _by_depth(values: dict[int, float | None]) -> dict[str, float | None]:
    return {str(depth): value for depth, value in values.items()}


def _training(grounded_rows: Artifact, model: Artifact) -> dict[str, Any]:
    """The training curves that the two training stages left, for the report; grounding up to the epoch taken."""
    ground, finetune = (_json(artifact, "training.json") for artifact in (grounded_rows, model))
    started_at = _rows_epoch(model)
    last = math.inf if started_at == models.LAST_EPOCH else started_at
    return {
        "ground": [row for row in ground.get("log", []) if row["epoch"] <= last],
        "finetune": finetune.get("log", []),
        "t_star": finetune.get("t_star"),
        "best_epoch": finetune.get("best_epoch"),
    }


def _json(artifact: Artifact, name: str) -> dict[str, Any]:
    """A JSON file that an artifact may hold (rows that were not grounded have no training), else an empty one."""
    return artifact.read_json(name) if (artifact.path / name).is_file() else {}


def _summary(stages: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The key figures that are defined, flat."""
    last = stages[FINE_TUNING]
    figures = {f"effective_rank_{name.replace('-', '_')}": s["effective_rank"] for name, s in stages.items()}
    figures |= {
        "sigma_geo": last["sigma_geo"],
        "rsa_pearson": last["rsa_pearson"],
        "purity": last["purity"],
        "purity_random": last["purity_random"],
        "purity_encoder": last["purity_encoder"],
        "r2_popularity_5": last["r2"]["popularity"]["5"],
        "r2_semantic_5": last["r2"]["semantic"]["5"],
    }
    return {name: value for name, value in figures.items() if value is not None}


def _figures(level: int, neighbours: int) -> list[dict[str, str]]:
    """Each figure's file, title and what a reader should know to read it."""
    captions = {
        "cosine": (
            "Cosine between rows",
            f"Above: the rows of level {level}, ordered by the majority category of their codes; lines part the"
            " categories, and squares on the diagonal mean that codes of a category point the same way. Below: the rows"
            " of all semantic levels, parted by level. One scale a line; all rows alike is the darkest colour.",
        ),
        "spectra": (
            "Singular values",
            "The slower the fall, the more directions the rows use. A row set that is all one vector has no centred"
            " spectrum.",
        ),
        "rsa": (
            "Do rows keep the codebook's geometry?",
            "Each point is a pair of codes: the cosine of their codebook vectors against the cosine of their rows, with"
            f" Pearson r and Spearman ρ, on level {level}. Darker means more pairs (logarithmic).",
        ),
        "purity": (
            "Neighbourhood purity",
            f"Share of a code's {neighbours} nearest codes that have its majority category, mean over codes, beside"
            " random neighbours and the quantizer's own vectors.",
        ),
        "alignment": (
            "What the leading directions encode",
            "Share of a target that lies in the top principal directions of the centred rows: popularity is"
            " log(1 + training targets) of a code, categories are one-hot. Rows that keep meaning score low on the left"
            " and high on the right.",
        ),
        "map": (
            "Map of the rows",
            f"Rows of level {level} on their own two principal directions. Colour: majority category of the code. Area:"
            " log popularity.",
        ),
        "popularity": (
            "Code frequency and item popularity",
            "How training targets spread over the codes, in total and per item, and how much of the variance of items'"
            " log popularity a SID prefix explains.",
        ),
        "popularity_axis": (
            "Popularity axis",
            "Projection of the centred output rows on the mean final hidden state that predicts the level's codes,"
            " against training targets. A slope means that frequent codes are pushed along this axis.",
        ),
        "text": (
            "New rows among text rows",
            f"Cosines of the rows of level {level} with a sample of text rows of the same model.",
        ),
    }
    return [{"file": f"figures/{n}.png", "title": title, "caption": text} for n, (title, text) in captions.items()]
