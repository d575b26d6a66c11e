"""Diagnose the geometry of the new rows before and after each stage. Run: sidgraft diagnose --help.

Shapes: N items · L semantic levels · K codes of the level · S codes of all semantic levels · D model width ·
d codebook width · M text rows.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from sidgraft import artifacts, geometry, models, plots, quantizers
from sidgraft.artifacts import Artifact
from sidgraft.catalog import item_categories
from sidgraft.checks import positive
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
    texts = _sample(vocabulary.first_id, text_rows, rng)

    # What the codes stand for.
    items = inputs["catalog"].read_table("catalog.parquet", columns=["item_id", "category"])
    sids = inputs["semantic_ids"].read_table("semantic_ids.parquet")
    check_same_items(items, sids)
    item_ids, codes_NL, categories_N = items["item_id"].to_pylist(), codes_array(sids), item_categories(items)
    trained_on = read_queries(inputs["interactions"], item_ids) or read_sequences(inputs["interactions"], item_ids)
    counts_N = training_counts(inputs["interactions"].read_table("interactions.parquet"), item_ids)
    size = vocabulary.sizes[level]
    totals_K = geometry.code_totals(codes_NL[:, level], counts_N, size)
    items_K = geometry.code_totals(codes_NL[:, level], np.ones(len(item_ids)), size)
    categories_K = geometry.majority_categories(codes_NL[:, level], categories_N, size)
    codebooks = [book.astype(np.float64) for book in quantizers.load(inputs["semantic_ids"]).centroids]

    # The rows at the three points, with text rows of the same model.
    started_at = inputs["model"].arguments.get("rows_epoch", models.LAST_EPOCH)  # the epoch of grounding
    initial = models.load_rows(inputs["initial_rows"])
    grounded = models.load_rows(inputs["grounded_rows"], started_at)
    base_MD, origin_D = _base_texts(inputs["initial_rows"], vocabulary, texts)
    tuned, tuned_MD, axis_D = _fine_tuned(inputs["model"], vocabulary, level, texts, trained_on, codes_NL, rng)
    tensors = {INITIALIZATION: initial, GROUNDING: grounded, FINE_TUNING: tuned}
    texts_MD = {INITIALIZATION: base_MD, GROUNDING: base_MD, FINE_TUNING: tuned_MD}
    rows_ND = {name: _float64(t["rows"]) for name, t in tensors.items()}
    output_ND = {name: _float64(t.get("head_rows", t["rows"])) for name, t in tensors.items()}
    origin_D = _float64(initial["mu"]) if "mu" in initial else origin_D

    # Of one level, and of all semantic levels (S rows; they stand first among the new rows).
    here, semantic = vocabulary.level_rows(level), slice(0, sum(vocabulary.sizes[:-1]))
    of_level_KD = {name: rows[here] for name, rows in rows_ND.items()}
    of_all_SD = {name: rows[semantic] for name, rows in rows_ND.items()}
    vectors_Kd, vectors_Sd = codebooks[level], np.concatenate(codebooks)
    shown_K, shown_S = _sample(size, MOST_ROWS, rng), _sample(semantic.stop, MOST_ROWS, rng)
    projections_K = {name: geometry.axis_projection(rows[here], axis_D) for name, rows in output_ND.items()}
    popularity_KT, semantic_KT = geometry.popularity_target(totals_K), geometry.category_target(categories_K)
    random = geometry.random_purity(categories_K)
    encoder = geometry.neighbourhood_purity(vectors_Kd, categories_K, neighbours)

    stages: dict[str, dict[str, Any]] = {}
    for name in tensors:
        rows_KD, rows_SD = of_level_KD[name], of_all_SD[name]
        spectrum = geometry.singular_values(geometry.centred(rows_KD))
        spectrum_all = geometry.singular_values(rows_SD)
        rsa = geometry.rsa(rows_KD[shown_K], vectors_Kd[shown_K])
        rsa_all = geometry.rsa(rows_SD[shown_S], vectors_Sd[shown_S])
        stages[name] = {
            "rank": geometry.rank(spectrum, rows_KD.shape),
            "effective_rank": geometry.effective_rank(spectrum, rows_KD.shape),
            "effective_rank_all": geometry.effective_rank(spectrum_all, rows_SD.shape),
            "sigma_geo": geometry.sigma_geo(spectrum, rows_KD.shape),
            "mean_cosine": geometry.mean_pairwise_cosine(rows_KD),
            "mean_cosine_all": geometry.mean_pairwise_cosine(rows_SD),
            "mean_cosine_text": geometry.mean_cosine(rows_KD, texts_MD[name]),
            "rsa_pearson": rsa[0],
            "rsa_spearman": rsa[1],
            "rsa_pearson_all": rsa_all[0],
            "rsa_spearman_all": rsa_all[1],
            "purity": geometry.neighbourhood_purity(rows_KD, categories_K, neighbours),
            "purity_random": random,
            "purity_encoder": encoder,
            "r2": {
                "popularity": _by_depth(geometry.alignment(rows_KD, popularity_KT, DEPTHS)),
                "semantic": _by_depth(geometry.alignment(rows_KD, semantic_KT, DEPTHS)),
            },
            "cosine_to_initialization": geometry.mean_matched_cosine(rows_KD, of_level_KD[INITIALIZATION], origin_D),
            "cosine_to_centroids": geometry.mean_matched_cosine(
                rows_KD, _float64(initial["centroid_rows"])[here], origin_D
            )
            if "centroid_rows" in initial
            else None,
            "popularity_axis_correlation": geometry.pearson(projections_K[name], totals_K),
            "popularity_axis_spearman": geometry.spearman(projections_K[name], totals_K),
            "spectrum": spectrum.tolist(),
            "spectrum_all": spectrum_all.tolist(),
        }
    explained = geometry.explained_variance(codes_NL[:, :-1], counts_N)

    arguments = {"level": level, "neighbours": neighbours, "text_rows": text_rows, "variant": variant, "seed": seed}
    with artifacts.create(out, "diagnostics/v1", stage="diagnose", arguments=arguments, inputs=inputs) as draft:
        cosines_KK, cosines_SS, cosines_KM = {}, {}, {}
        for name in tensors:
            level_KD, all_SD = of_level_KD[name][shown_K], of_all_SD[name][shown_S]
            cosines_KK[name] = geometry.cosine_matrix(level_KD, level_KD)
            cosines_SS[name] = geometry.cosine_matrix(all_SD, all_SD)
            cosines_KM[name] = geometry.cosine_matrix(level_KD, texts_MD[name])
            draft.write_table(f"cosine_{name}.parquet", _matrix_table(shown_K, cosines_KK[name]))
            draft.write_table(f"cosine_text_{name}.parquet", _matrix_table(shown_K, cosines_KM[name]))

        figures = draft.path / "figures"
        figures.mkdir()
        order, bounds = plots.category_order([categories_K[k] for k in shown_K])
        ends_S = np.searchsorted(shown_S, np.cumsum(vocabulary.sizes[:-2])).tolist()
        plots.cosine_matrices(
            figures / "cosine.png",
            {name: matrix[np.ix_(order, order)] for name, matrix in cosines_KK.items()},
            cosines_SS,
            label=f"level {level}",
            bounds=bounds,
            all_bounds=ends_S,
        )
        plots.spectra(
            figures / "spectra.png",
            {name: stage["spectrum"] for name, stage in stages.items()},
            {name: stage["spectrum_all"] for name, stage in stages.items()},
            label=f"level {level}",
        )
        plots.rsa(
            figures / "rsa.png",
            {name: geometry.pair_cosines(rows[shown_K], vectors_Kd[shown_K]) for name, rows in of_level_KD.items()},
            {name: (stage["rsa_pearson"], stage["rsa_spearman"]) for name, stage in stages.items()},
        )
        plots.purity(
            figures / "purity.png",
            {name: stage["purity"] for name, stage in stages.items()},
            random=random,
            encoder=encoder,
            neighbours=neighbours,
        )
        plots.alignment(
            figures / "alignment.png",
            {name: stage["r2"]["popularity"] for name, stage in stages.items()},
            {name: stage["r2"]["semantic"] for name, stage in stages.items()},
        )
        plots.row_map(
            figures / "map.png",
            {name: geometry.principal_plane(of_level_KD[name]) for name in (INITIALIZATION, FINE_TUNING)},
            categories_K,
            np.log1p(totals_K),
        )
        plots.code_popularity(figures / "popularity.png", totals_K, items_K, explained, label=f"level-{level}")
        plots.popularity_axis(
            figures / "popularity_axis.png",
            projections_K,
            totals_K,
            {n: (s["popularity_axis_correlation"], s["popularity_axis_spearman"]) for n, s in stages.items()},
        )
        plots.text_cosines(figures / "text.png", cosines_KM)

        draft.write_json(
            "diagnostics.json",
            {
                "variant": variant,
                "seed": seed,
                "level": level,
                "neighbours": neighbours,
                "stages": stages,
                "explained_variance": _by_depth(explained),
                "training": _training(inputs["grounded_rows"], inputs["model"], started_at),
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
    trained_on: Sequences | Queries,
    codes_NL: np.ndarray,
    rng: np.random.Generator,
) -> tuple[dict[str, torch.Tensor], np.ndarray, np.ndarray]:
    """The new rows of the fine-tuned model, its text rows [M, D] and the popularity axis [D]."""
    model, tokenizer, _ = models.load_model(artifact, torch.float32)
    rows_VD, _ = models.base_rows(model, vocabulary)
    max_length, tokens_NS = int(artifact.arguments["max_length"]), vocabulary.item_tokens(codes_NL)
    if isinstance(trained_on, Queries):
        fitting = QueryItem(tokenizer, vocabulary, max_length)
        query_P, item_P = trained_on.training_pairs()
        chosen = _sample(len(query_P), MOST_HISTORIES, rng)
        asked = fitting.texts([trained_on.prompts[query] for query in query_P[chosen]])
        sequences = [
            fitting.sample(text, tokens_NS[item]).ids_S for text, item in zip(asked, item_P[chosen], strict=True)
        ]
    else:
        prompts, histories = NextItem(tokenizer, vocabulary, max_length), trained_on.training()
        chosen = _sample(len(histories), MOST_HISTORIES, rng)
        sequences = [prompts.sample(tokens_NS[histories[user]]).ids_S for user in chosen]
    axis_D = _mean_hidden_state(model, sequences, vocabulary, level)
    return models.take_rows(model, vocabulary), _float64(rows_VD[texts]), axis_D


def _mean_hidden_state(model: Any, sequences: list[np.ndarray], vocabulary: SidVocabulary, level: int) -> np.ndarray:
    """Mean over the sequences of the final hidden state (what the head multiplies) one before each code of the level.

    Float64 [D]; zeros when no sequence holds such a code.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device).eval()
    first = vocabulary.level_first_ids[level]
    total_D, count = np.zeros(model.config.hidden_size), 0
    for ids_S in track(sequences, "popularity axis", len(sequences), "histories"):
        at = np.flatnonzero((ids_S[1:] >= first) & (ids_S[1:] < first + vocabulary.sizes[level]))
        with torch.inference_mode():
            hidden_SD = model.get_decoder()(torch.from_numpy(ids_S)[None].to(device)).last_hidden_state[0]
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


def _training(grounded_rows: Artifact, model: Artifact, started_at: int) -> dict[str, Any]:
    """The training curves that the two training stages left, for the report; grounding up to the epoch taken."""
    ground, finetune = (_json(artifact, "training.json") for artifact in (grounded_rows, model))
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
