"""RQ-VAE: an autoencoder whose latent vector is the sum of one code vector a level (METHOD 4).

Lee et al., Autoregressive Image Generation using Residual Quantization (2022); Rajput et al., TIGER (2023).
Shapes: N items · L semantic levels · K codes of a level · d width of the vectors · C width of codes · B rows of
a batch · S sampled items · M items held out.

r_1 = encoder(x); per level k_l = argmin_k ||r_l - q_lk||², r_{l+1} = r_l - q_l,k_l; x̂ = decoder(sum of the q).
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn.functional import embedding

from sidgraft import checks, kmeans, sinkhorn
from sidgraft.progress import Progress, say
from sidgraft.quality import code_use
from sidgraft.residual import START_ROUNDS, units

SAMPLE = 50_000  # most encodings that codebooks start from and that the curves are measured on
HELD_OUT, MOST_HELD_OUT = 20, 10_000  # one in 20 items judges when to stop
WARM_UP_STEPS, WARM_UP_RATE = 200, 1e-3  # of encoder and decoder, before there are codes
STEPS_BETWEEN_MEASUREMENTS = 100
ROWS_PER_CHUNK = 4096


@dataclass(frozen=True)
class Losses:
    """The parts of the loss, scalars. Means over batch and width; codebook, commitment and diversity sum the levels."""

    reconstruction: torch.Tensor
    codebook: torch.Tensor
    commitment: torch.Tensor
    diversity: torch.Tensor

    def total(self, commitment: float, diversity: float) -> torch.Tensor:
        """The loss that is minimised."""
        return self.reconstruction + self.codebook + commitment * self.commitment + diversity * self.diversity


class RqVae(torch.nn.Module):
    """Encoder, codebooks [K_l, C] and decoder.

    What goes in are unit vectors, shifted by ``mean_d`` and divided by ``scale``, one number for all dimensions: so
    distances keep their proportions, and coordinates have a mean square of 1 whatever the width.
    """

    mean_d: torch.Tensor
    scale: torch.Tensor

    def __init__(self, dim: int, sizes: list[int], *, code_dim: int, hidden: list[int], dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder = mlp([dim, *hidden, code_dim], dropout)
        self.decoder = mlp([code_dim, *reversed(hidden), dim], dropout)
        self.codebooks = torch.nn.ParameterList([torch.zeros(size, code_dim) for size in sizes])
        self.register_buffer("mean_d", torch.zeros(dim))
        self.register_buffer("scale", torch.ones(()))

    def losses(self, inputs_Bd: torch.Tensor, *, balanced: bool = False) -> Losses:
        """The losses of a batch of standardised vectors, each code the nearest, or one by balanced assignment.

        reconstruction: (x̂ - x)²; codebook: (sg[r_l] - q)²; commitment: (r_l - sg[q])², sg the stopped gradient; the
        decoder's gradient passes straight through to the encoder. diversity: ln K - H(p̄), p̄ the batch mean of
        softmax_k(-||r_l - q_lk||² / s), s the batch mean of the squared distance to the nearest code: zero when a
        batch uses all codes equally.
        """
        latents_BC = self.encoder(inputs_Bd)
        rest_BC, sum_BC = latents_BC, torch.zeros_like(latents_BC)
        codebook = commitment = diversity = inputs_Bd.new_zeros(())
        for book_KC in self.codebooks:
            distances_BK = 2 * kmeans.scores(rest_BC, book_KC) + rest_BC.square().sum(1, keepdim=True)
            known_BK = distances_BK.detach()
            codes_B = sinkhorn.balanced(known_BK) if balanced else known_BK.argmin(1)
            temperature = known_BK.amin(1).clamp(min=0).mean().clamp(min=1e-12)
            shares_K = torch.softmax(-distances_BK / temperature, dim=1).mean(0)
            # the logarithm of a share that is zero has no gradient: a code far from all points would end the training
            logs_K = shares_K.clamp(min=1e-12).log()
            diversity = diversity + math.log(len(book_KC)) + (shares_K * logs_K).sum()
            # embedding(), because the gradient of plain indexing adds up in another order each time on several threads
            chosen_BC = embedding(codes_B, book_KC)
            codebook = codebook + (rest_BC.detach() - chosen_BC).square().mean()
            commitment = commitment + (rest_BC - chosen_BC.detach()).square().mean()
            rest_BC = rest_BC - chosen_BC.detach()
            sum_BC = sum_BC + chosen_BC
        through_BC = latents_BC + (sum_BC - latents_BC).detach()
        reconstruction = (self.decoder(through_BC) - inputs_Bd).square().mean()
        return Losses(reconstruction, codebook, commitment, diversity)

    def standardised(self, vectors_Nd: np.ndarray) -> torch.Tensor:
        """What goes into the encoder: vectors of any length to unit length, shifted and scaled; float32 [N, d]."""
        return (torch.from_numpy(units(vectors_Nd)) - self.mean_d) / self.scale

    def encode(self, vectors_Nd: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Codes [N, L], int64, and the lengths ||r_1|| .. ||r_{L+1}|| [N, L+1], float64, of vectors [N, d].

        The encoder runs in float64 and its result is rounded to float32, so that neither the batch that a vector
        stands in nor the number of threads changes its codes. Ties go to the lowest code.
        """
        encoder = copy.deepcopy(self.encoder).double().eval()
        levels = len(self.codebooks)
        codes_NL, lengths_NM = np.empty((len(vectors_Nd), levels), np.int64), np.empty((len(vectors_Nd), levels + 1))
        for first in range(0, len(vectors_Nd), ROWS_PER_CHUNK):
            chunk = slice(first, first + ROWS_PER_CHUNK)
            with torch.inference_mode():
                rest_BC = encoder(self.standardised(vectors_Nd[chunk]).double()).float()
                lengths_NM[chunk, 0] = rest_BC.double().square().sum(1).sqrt().numpy()
                for level, book_KC in enumerate(self.codebooks):
                    codes_B = torch.cat(
                        [kmeans.nearest(rest_BC[rows], book_KC) for rows in kmeans.chunks(len(rest_BC), len(book_KC))]
                    )
                    rest_BC = rest_BC - book_KC[codes_B]
                    codes_NL[chunk, level] = codes_B.numpy()
                    lengths_NM[chunk, level + 1] = rest_BC.double().square().sum(1).sqrt().numpy()
        return codes_NL, lengths_NM

    def decode(self, codes_NL: np.ndarray) -> np.ndarray:
        """The unit vectors [N, d], float32, that codes [N, L] stand for."""
        self.eval()
        parts = []
        for first in range(0, len(codes_NL), ROWS_PER_CHUNK):
            codes_BL = torch.from_numpy(codes_NL[first : first + ROWS_PER_CHUNK])
            with torch.inference_mode():
                sum_BC = sum(book[codes_BL[:, level]] for level, book in enumerate(self.codebooks))
                parts.append((self.decoder(sum_BC) * self.scale + self.mean_d).numpy())
        return np.concatenate(parts)

    def tensors(self) -> dict[str, np.ndarray]:
        """All weights but the codebooks, by their names in the module."""
        return {n: t.numpy() for n, t in self.state_dict().items() if not n.startswith("codebooks.")}


def from_tensors(tensors: dict[str, np.ndarray], codebooks: list[np.ndarray]) -> RqVae:
    """The network whose `RqVae.tensors` are among these; its widths are those of the weights."""
    biases = [name for name in tensors if name.startswith("encoder.") and name.endswith(".bias")]
    *hidden, code_dim = [len(tensors[name]) for name in sorted(biases, key=lambda name: int(name.split(".")[1]))]
    network = RqVae(len(tensors["mean_d"]), [len(book) for book in codebooks], code_dim=code_dim, hidden=hidden)
    books = {f"codebooks.{level}": book for level, book in enumerate(codebooks)}
    network.load_state_dict({name: torch.from_numpy((tensors | books)[name]) for name in network.state_dict()})
    return network.eval()


def relative_lengths(lengths_NM: np.ndarray) -> np.ndarray:
    """What each level leaves [N, L], from `RqVae.encode`, relative to the root mean square of what it was given."""
    given_L = np.sqrt(np.square(lengths_NM[:, :-1]).mean(axis=0))
    return lengths_NM[:, 1:] / np.where(given_L > 0, given_L, 1.0)


def mlp(widths: list[int], dropout: float) -> torch.nn.Sequential:
    """Linear layers with ReLU and dropout between them; weights start by He's rule, which keeps the variance."""
    layers: list[torch.nn.Module] = []
    for before, after in pairwise(widths):
        linear = torch.nn.Linear(before, after)
        torch.nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        torch.nn.init.zeros_(linear.bias)
        layers += [linear, torch.nn.ReLU(), torch.nn.Dropout(dropout)]
    return torch.nn.Sequential(*layers[:-2])


# Training


def fit(
    vectors_Nd: np.ndarray,
    sizes: list[int],
    *,
    code_dim: int = 32,
    hidden: list[int],
    dropout: float = 0.1,
    learning_rate: float = 1e-3,
    commitment: float = 0.25,
    diversity: float = 0.01,
    balanced: bool = False,
    batch_size: int = 2048,
    epochs: int = 20_000,
    patience: int = 10,
    tolerance: float = 0.005,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[RqVae, dict[str, Any]]:
    """Train by Adam until the held-out error stops falling; return the network of the least error, and the record.

    First encoder and decoder learn for 200 steps to give back what goes in, without codes: codes that start from an
    untrained encoder are soon given up but for a few (docs/decisions/0038). Then, every 100 steps, or every epoch where
    that is longer, the error of one in 20 items, held out, is measured, and codes that no training item has are moved
    to what is left of a random one. Training stops after ``patience`` measurements in a row without an error below
    (1 - ``tolerance``) times the last one that counted, or after ``epochs``. The record holds the curves ("log"), the
    step that was kept and why training stopped. The same seed, machine and number of threads give the same network.

    Network and batches compute on ``device``; the vectors stay where they are, and the network that is returned is on
    the CPU, where its codes are exact. Raises ValueError where a level has fewer distinct vectors than codes, when the
    loss or the held-out error is no number, and when every measurement found more error than the vectors of random
    other items would leave.
    """
    with torch.random.fork_rng(devices=[device] if torch.device(device).type == "cuda" else []):
        torch.manual_seed(seed)
        network = RqVae(vectors_Nd.shape[1], sizes, code_dim=code_dim, hidden=hidden, dropout=dropout)
        _fit_scale(network, vectors_Nd)
        training_Nd, held_out_Md = _split(network.standardised(vectors_Nd))
        sample_Sd = training_Nd[torch.randperm(len(training_Nd))[:SAMPLE]]
        _warm_up(network.to(device), training_Nd, batch_size)
        start_from = network.standardised(vectors_Nd) if len(vectors_Nd) <= SAMPLE else sample_Sd
        start_codebooks(network.cpu(), start_from, seed)
        network.to(device)
        optimizer = torch.optim.Adam(network.parameters(), lr=learning_rate)
        batches = math.ceil(len(training_Nd) / batch_size)
        log: list[dict[str, Any]] = []
        of_the_mean = held_out_Md.square().sum(1).mean().item() * network.scale.item() ** 2
        best, best_state, best_step, advice = math.inf, {}, 0, f"lower learning_rate={learning_rate}"
        counted, waited, step, stopped = math.inf, 0, 0, f"epochs={epochs} reached"
        with Progress("rq-vae", epochs * batches, "steps") as progress:
            for epoch in range(1, epochs + 1):
                network.train()
                for batch, rows_B in enumerate(torch.randperm(len(training_Nd)).split(batch_size), 1):
                    losses = network.losses(training_Nd[rows_B].to(device), balanced=balanced)
                    loss = losses.total(commitment, diversity)
                    step += 1
                    at: dict[str, Any] = {"epoch": epoch, "batch": batch, "batches": batches, "advice": advice}
                    shown = loss.item()
                    checks.finite("the loss of the RQ-VAE", shown, **at)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    progress.update(loss=shown, error=best, without_improvement=f"{waited} of {patience}")
                due = step // STEPS_BETWEEN_MEASUREMENTS > (step - batches) // STEPS_BETWEEN_MEASUREMENTS
                if not due and epoch < epochs:
                    continue
                error = held_out_error(network, held_out_Md)
                checks.finite("the held-out error of the RQ-VAE", error, **at)
                codes_SL, rests = _assign(network, sample_Sd)
                log.append(_record(step, epoch, losses, loss, error, codes_SL, sizes))
                if error < best:
                    best, best_step, best_state = error, step, copy.deepcopy(network.state_dict())
                    if best < of_the_mean:  # the same seed goes the same way again: a later failure does not lose it
                        advice = (
                            f"lower learning_rate={learning_rate}, or keep the network of step {step} (held-out error"
                            f" {error:.4g}) with epochs={epoch}"
                        )
                counted, waited = (error, 0) if error < counted * (1 - tolerance) else (counted, waited + 1)
                if waited == patience:
                    stopped = f"{patience} measurements without an improvement by {tolerance:g}"
                    break
                log[-1]["revived"] = revive(network, optimizer, codes_SL, rests)
        if best > 2 * of_the_mean:  # what the vector of a random other item leaves, on average
            raise ValueError(
                f"the RQ-VAE's held-out error is never less than {best:.4g} (step {best_step} of {step}), and random"
                f" other items leave {2 * of_the_mean:.4g}: lower learning_rate={learning_rate}, or give more epochs."
            )
        network.load_state_dict(best_state)
    kept = next(entry for entry in log if entry["step"] == best_step)
    say(
        f"rq-vae: kept step {best_step} of {step} ({stopped}), held-out error {best:.4f} (the mean vector leaves"
        f" {of_the_mean:.4f}), perplexity {', '.join(f'{level:.0f}' for level in kept['perplexity'])} of"
        f" {', '.join(map(str, sizes))} codes"
    )
    record = {"best_step": best_step, "held_out_error": best, "error_of_the_mean": of_the_mean, "stopped": stopped}
    return network.cpu().eval(), {"log": log} | record


def _fit_scale(network: RqVae, vectors_Nd: np.ndarray) -> None:
    units_Nd = network.standardised(vectors_Nd)
    network.mean_d.copy_(units_Nd.mean(0, dtype=torch.float64).float())
    spread = (units_Nd - network.mean_d).square().mean(dtype=torch.float64).sqrt().float()
    network.scale.copy_(spread if spread > 0 else torch.ones(()))


def _split(inputs_Nd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and held-out part, at random; with fewer than 20 items all are both."""
    held_out = min(len(inputs_Nd) // HELD_OUT, MOST_HELD_OUT)
    order_N = torch.randperm(len(inputs_Nd))
    return (inputs_Nd[order_N[held_out:]], inputs_Nd[order_N[:held_out]]) if held_out else (inputs_Nd, inputs_Nd)


def _warm_up(network: RqVae, training_Nd: torch.Tensor, batch_size: int) -> None:
    """Train encoder and decoder as an autoencoder, with no codes between them."""
    network.train()
    optimizer = torch.optim.Adam([*network.encoder.parameters(), *network.decoder.parameters()], lr=WARM_UP_RATE)
    with Progress("rq-vae without codes", WARM_UP_STEPS, "steps") as progress:
        for _ in range(WARM_UP_STEPS):
            rows_B = torch.randint(len(training_Nd), (min(batch_size, len(training_Nd)),))
            inputs_Bd = training_Nd[rows_B].to(network.scale.device)
            loss = (network.decoder(network.encoder(inputs_Bd)) - inputs_Bd).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            progress.update(reconstruction=loss.item())


def start_codebooks(network: RqVae, inputs_Sd: torch.Tensor, seed: int) -> None:
    """Set the codebooks by k-means on the encodings of a sample, level by level on what the level before leaves."""
    network.eval()
    with torch.inference_mode():
        rest_SC = torch.cat([network.encoder(inputs_Bd) for inputs_Bd in inputs_Sd.split(ROWS_PER_CHUNK)])
    for level, book_KC in enumerate(network.codebooks):
        generator = torch.Generator().manual_seed(seed * len(network.codebooks) + level)
        # k-means counts what is small against 1 as rounding: give it points whose length is about 1
        length = rest_SC.square().sum(1).mean().sqrt().clamp(min=1e-12)
        points_SC = rest_SC / length
        sample_TC = kmeans.start_sample(points_SC, len(book_KC), generator)
        start_KC = kmeans.start(sample_TC, len(book_KC), generator, others_Nd=points_SC, what=f"level {level}")
        start_KC = kmeans.lloyd(sample_TC, start_KC, START_ROUNDS, what=f"start of level {level}")
        book_KC.data.copy_(start_KC * length)
        codes_S = torch.cat([kmeans.nearest(p_BC, start_KC) for p_BC in points_SC.split(ROWS_PER_CHUNK)])
        rest_SC = rest_SC - book_KC.data[codes_S]


def held_out_error(network: RqVae, inputs_Md: torch.Tensor) -> float:
    """Mean of ||u - û||² over unit vectors u, from their codes alone, without dropout."""
    network.eval()
    total = 0.0
    for inputs_Bd in inputs_Md.split(ROWS_PER_CHUNK):
        with torch.inference_mode():
            losses = network.losses(inputs_Bd.to(network.scale.device))
            total += losses.reconstruction.item() * inputs_Bd.numel()
    return total / len(inputs_Md) * network.scale.item() ** 2


def _assign(network: RqVae, inputs_Sd: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Nearest codes [S, L], on the CPU, and the vectors [S, C] that each level's codes were chosen for."""
    network.eval()
    codes, rests, device = [], [], network.scale.device
    with torch.inference_mode():
        rest_SC = torch.cat([network.encoder(inputs_Bd.to(device)) for inputs_Bd in inputs_Sd.split(ROWS_PER_CHUNK)])
        for book_KC in network.codebooks:
            rests.append(rest_SC)
            chunks = kmeans.chunks(len(rest_SC), len(book_KC))
            codes.append(torch.cat([kmeans.scores(rest_SC[chunk], book_KC).argmin(1) for chunk in chunks]))
            rest_SC = rest_SC - book_KC[codes[-1]]
    return torch.stack(codes, dim=1).cpu(), rests


def revive(network: RqVae, optimizer: torch.optim.Adam, codes_SL: torch.Tensor, rests: list[torch.Tensor]) -> list[int]:
    """Move the codes that no sampled item has to what is left of random items at their level; how many, by level."""
    moved = []
    for level, (book_KC, rest_SC) in enumerate(zip(network.codebooks, rests, strict=True)):
        dead = (torch.bincount(codes_SL[:, level], minlength=len(book_KC)) == 0).nonzero()[:, 0]
        dead = dead[: len(rest_SC)]
        book_KC.data[dead] = rest_SC[torch.randperm(len(rest_SC))[: len(dead)]]
        for name in ("exp_avg", "exp_avg_sq"):  # the moments of the old place mean nothing at the new one
            if name in optimizer.state.get(book_KC, {}):
                optimizer.state[book_KC][name][dead] = 0.0
        moved.append(len(dead))
    return moved


def _record(
    step: int,
    epoch: int,
    losses: Losses,
    loss: torch.Tensor,
    error: float,
    codes_SL: torch.Tensor,
    sizes: list[int],
) -> dict[str, Any]:
    """One measurement: the losses of the last batch, the held-out error, and how the codes are used."""
    _, bucket_S, counts = torch.unique(codes_SL, dim=0, return_inverse=True, return_counts=True)
    record: dict[str, Any] = {"step": step, "epoch": epoch, "loss": loss.item()}
    record |= {name: part.item() for name, part in vars(losses).items()}
    record |= {"held_out_error": error, "collision_rate": (counts[bucket_S] > 1).double().mean().item()}
    use = [code_use(np.bincount(codes_SL[:, level], minlength=size)) for level, size in enumerate(sizes)]
    return record | {"utilisation": [u for u, _ in use], "perplexity": [p for _, p in use]}
