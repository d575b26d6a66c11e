"""A fitted quantizer: encodes vectors as those it was fitted on; with it the reduction before and the code after.

Shapes: N items · L semantic levels · K codes of a level · D width of the embeddings · d of what is quantized.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from safetensors.numpy import load_file

from sidgraft import kmeans, residual, rqvae
from sidgraft.artifacts import Artifact

CODEBOOKS, DESCRIPTION = "codebooks.safetensors", "quantizer.json"
PCA_ITEMS = 50_000  # most items that principal components are fitted to


@dataclass(frozen=True)
class Quantizer:
    """A fitted quantizer; encodes new vectors exactly as those it was fitted on.

    ``codebooks`` has one float32 array a level: [K_l, d] of residual k-means, [K_l, code width] of an RQ-VAE.
    ``sizes`` are the codes of each level, deduplication last. ``mean_D`` and ``components_Dd`` are the PCA that comes
    before, if any. ``mean_lengths`` [L] are the mean lengths that each level of residual k-means left of the vectors it
    was fitted on. Of an RQ-VAE, ``network`` is the rest of it, ``means`` [K_l, d] the mean unit vectors of each
    code's items, and ``counts`` [K_l] how many these are.
    """

    codebooks: list[np.ndarray]
    sizes: list[int]
    mean_D: np.ndarray | None = None
    components_Dd: np.ndarray | None = None
    network: rqvae.RqVae | None = None
    means: list[np.ndarray] | None = None
    counts: list[np.ndarray] | None = None
    mean_lengths: np.ndarray | None = None

    @property
    def centroids(self) -> list[np.ndarray]:
        """The vector [K_l, d] that each semantic code stands for, in the space that is quantized.

        Of residual k-means the codebooks. Of an RQ-VAE, whose codebooks live in a space of their own, the mean unit
        vector of the code's items (METHOD 5), and for codes without items the mean of all others' centroids: it has
        no direction of its own once that mean is taken off.
        """
        return self.codebooks if self.means is None else self.means

    @property
    def has_centroid(self) -> np.ndarray:
        """Which semantic codes [sum K_l], by level, have a centroid of their own: of an RQ-VAE those with items."""
        if self.counts is None:
            return np.ones(sum(self.sizes[:-1]), dtype=bool)
        return np.concatenate(self.counts) > 0

    @property
    def dim(self) -> int:
        """Width d of the centroids."""
        return self.centroids[0].shape[1]

    def reduced(self, vectors_ND: np.ndarray) -> np.ndarray:
        """What is quantized of vectors as the encoder gives them, float32 [N, d]."""
        return reduce(vectors_ND, self.dim, self.mean_D, self.components_Dd)

    def encode(self, vectors_ND: np.ndarray) -> np.ndarray:
        """The semantic codes [N, L] of vectors as the encoder gives them, int64, without the deduplication code."""
        codes = [np.zeros((0, len(self.codebooks)), np.int64)]
        for chunk in kmeans.chunks(len(vectors_ND), self.dim):
            reduced_Bd = self.reduced(vectors_ND[chunk])
            if self.network is None:
                codes.append(residual.encode(reduced_Bd, self.codebooks))
            else:
                codes.append(self.network.encode(reduced_Bd)[0])
        return np.concatenate(codes)

    def decode(self, codes_NL: np.ndarray) -> np.ndarray:
        """The unit vectors that semantic codes [N, L] alone stand for, float32 [N, d].

        It is the decoder of the fit, whatever the items: so their errors compare with those of the fit.
        """
        if self.network is not None:
            return self.network.decode(codes_NL)
        if self.mean_lengths is None:
            raise ValueError(
                "the quantizer does not say which lengths its levels leave, so nothing can be decoded: run `sidgraft"
                " quantize` again."
            )
        return residual.decode(codes_NL, self.codebooks, self.mean_lengths)

    def lengths(self, reduced_Nd: np.ndarray, codes_NL: np.ndarray) -> np.ndarray:
        """The lengths [N, L], float64, that each level leaves of reduced vectors with these codes.

        Each is relative to what the level was given, of an RQ-VAE to its root mean square over these vectors.
        """
        if self.network is not None:
            return rqvae.relative_lengths(self.network.encode(reduced_Nd)[1])
        return residual.lengths(reduced_Nd, codes_NL, self.codebooks)

    def renumbered(self, numbers: list[np.ndarray]) -> Quantizer:
        """The same quantizer with other numbers for its codes: code k of level l becomes ``numbers[l][k]``.

        ``numbers`` has a permutation [K_l] for each semantic level.
        """

        def moved(books: list[np.ndarray]) -> list[np.ndarray]:
            return [book[np.argsort(number_K)] for book, number_K in zip(books, numbers, strict=True)]

        codebooks, network = moved(self.codebooks), self.network
        if network is not None:
            network = rqvae.from_tensors(network.tensors(), codebooks)
        return replace(
            self,
            codebooks=codebooks,
            network=network,
            means=None if self.means is None else moved(self.means),
            counts=None if self.counts is None else moved(self.counts),
        )

    def tensors(self) -> dict[str, np.ndarray]:
        """What `codebooks.safetensors` holds."""
        optional = {"pca_mean": self.mean_D, "pca_components": self.components_Dd, "mean_lengths": self.mean_lengths}
        tensors = {f"codebook_{level}": book for level, book in enumerate(self.codebooks)}
        for level, (means_Kd, counts_K) in enumerate(zip(self.means or [], self.counts or [], strict=True)):
            tensors |= {f"centroid_{level}": means_Kd, f"items_{level}": counts_K}
        if self.network is not None:
            tensors |= self.network.tensors()
        return tensors | {name: tensor for name, tensor in optional.items() if tensor is not None}


def load(semantic_ids: Artifact) -> Quantizer:
    """The quantizer of a semantic_ids artifact: `load(artifact).encode(embeddings)` gives the codes of new items."""
    tensors = load_file(semantic_ids.path / CODEBOOKS)
    sizes = semantic_ids.read_json(DESCRIPTION)["sizes"]
    levels = range(len(sizes) - 1)
    codebooks = [tensors[f"codebook_{level}"] for level in levels]
    pca = tensors.get("pca_mean"), tensors.get("pca_components")
    if "centroid_0" not in tensors:
        return Quantizer(codebooks, sizes, *pca, mean_lengths=tensors.get("mean_lengths"))
    means, counts = ([tensors[f"{name}_{level}"] for level in levels] for name in ("centroid", "items"))
    return Quantizer(codebooks, sizes, *pca, rqvae.from_tensors(tensors, codebooks), means, counts)


def item_means(
    vectors_Nd: np.ndarray, codes_NL: np.ndarray, sizes: list[int]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Mean unit vector [K_l, d] and number [K_l] of the items of each code; without items, the mean of the others'."""
    sums = [np.zeros((size, vectors_Nd.shape[1])) for size in sizes]
    for chunk in kmeans.chunks(len(vectors_Nd), vectors_Nd.shape[1]):
        units_Bd = residual.units(vectors_Nd[chunk])
        for level, sums_Kd in enumerate(sums):
            np.add.at(sums_Kd, codes_NL[chunk, level], units_Bd)
    counts = [np.bincount(codes_NL[:, level], minlength=size) for level, size in enumerate(sizes)]
    means = [s / np.maximum(c, 1)[:, None] for s, c in zip(sums, counts, strict=True)]
    centre_d = np.concatenate([m[c > 0] for m, c in zip(means, counts, strict=True)]).mean(axis=0)
    for means_Kd, counts_K in zip(means, counts, strict=True):
        means_Kd[counts_K == 0] = centre_d
    return [means_Kd.astype(np.float32) for means_Kd in means], counts


# Reduction


def fit_pca(vectors_ND: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean [D] and first ``dim`` principal components [D, dim], float64 inside, float32 out.

    The largest entry of each component is positive, so that the result has no arbitrary signs.
    """
    if dim > len(vectors_ND):
        raise ValueError(
            f"pca to dim={dim} needs at least {dim} items, found {len(vectors_ND)}: lower --dim or use"
            " --reduction truncate."
        )
    mean_D = vectors_ND.mean(axis=0, dtype=np.float64)
    covariance_DD = np.zeros((len(mean_D), len(mean_D)))
    for chunk in kmeans.chunks(len(vectors_ND), len(mean_D)):
        centred_BD = vectors_ND[chunk] - mean_D
        covariance_DD += centred_BD.T @ centred_BD
    components_Dd = np.linalg.eigh(covariance_DD)[1][:, ::-1][:, :dim]
    largest_d = components_Dd[np.abs(components_Dd).argmax(axis=0), np.arange(dim)]
    return mean_D.astype(np.float32), (components_Dd * np.where(largest_d < 0, -1.0, 1.0)).astype(np.float32)


def reduce(vectors_ND: np.ndarray, dim: int, mean_D: np.ndarray | None, components_Dd: np.ndarray | None) -> np.ndarray:
    """Vectors [N, D] to float32 [N, dim]: projected on the components where given, else their first dimensions."""
    if mean_D is None or components_Dd is None:
        return vectors_ND[:, :dim].astype(np.float32, copy=False)
    reduced_Nd = np.empty((len(vectors_ND), dim), np.float32)
    for chunk in kmeans.chunks(len(vectors_ND), vectors_ND.shape[1]):
        reduced_Nd[chunk] = (vectors_ND[chunk] - mean_D.astype(np.float64)) @ components_Dd.astype(np.float64)
    return reduced_Nd


# Deduplication


def deduplicate(codes_NL: np.ndarray, dedup_size: int) -> np.ndarray:
    """Append the deduplication code, int64 [N, L+1]: an item's rank among the items with its L codes.

    Rows stand in item_id order, which is the order of the ranks. Raises ValueError when more than
    ``dedup_size`` items share their codes.
    """
    order_N, first_N = _buckets(codes_NL)
    starts = np.flatnonzero(first_N)
    ranks_N = np.arange(len(codes_NL)) - starts[np.cumsum(first_N) - 1]
    if len(ranks_N) and ranks_N.max() >= dedup_size:
        shared = codes_NL[order_N[ranks_N.argmax()]].tolist()
        raise ValueError(
            f"{ranks_N.max() + 1} items share the codes {shared}, but dedup_size={dedup_size} tells only"
            f" {dedup_size} apart: raise dedup_size, codebook_size or levels. If most items share few codes, look"
            " at the embeddings: they may be nearly equal."
        )
    codes = np.empty((len(codes_NL), codes_NL.shape[1] + 1), np.int64)
    codes[:, :-1] = codes_NL
    codes[order_N, -1] = ranks_N
    if not _buckets(codes)[1].all():
        raise AssertionError("two items got the same Semantic ID: this is a defect of sidgraft, please report it.")
    return codes


def _buckets(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The order that puts equal rows together, each in its former order, and which of these rows are a new one."""
    order_N = np.lexsort(codes.T[::-1])
    sorted_codes = codes[order_N]
    first_N = np.ones(len(codes), dtype=bool)
    first_N[1:] = (sorted_codes[1:] != sorted_codes[:-1]).any(axis=1)
    return order_N, first_N
