"""The RQ-VAE against plain NumPy in float64: forward, every loss, codes; and what its training promises."""

import re

import numpy as np
import pytest
import torch

from sidgraft import residual, rqvae, sinkhorn
from sidgraft.rqvae import RqVae

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
TINY = {"code_dim": 4, "hidden": [32], "dropout": 0.1, "batch_size": 64, "patience": 3, "learning_rate": 0.003}


def network(sizes=(7, 5), dim=9, seed=0):
    torch.manual_seed(seed)
    made = RqVae(dim, list(sizes), code_dim=4, hidden=[12, 6])
    for parameter in made.parameters():
        parameter.data = torch.randn_like(parameter) * 0.5
    made.mean_d.copy_(torch.randn(dim) * 0.1)
    made.scale.copy_(torch.tensor(0.3))
    return made.eval()


def vectors(n=50, dim=9, seed=1):
    return np.random.default_rng(seed).standard_normal((n, dim)).astype(np.float32)


def clusters(n=400, dim=10, seed=0):
    """Two levels of meaning: 6 clusters, far apart, of 4 each, and little noise."""
    rng = np.random.default_rng(seed)
    centres, offsets = 3 * rng.standard_normal((6, dim)), 0.3 * rng.standard_normal((4, dim))
    of = rng.integers(6, size=n)
    points = centres[of] + offsets[rng.integers(4, size=n)] + 0.02 * rng.standard_normal((n, dim))
    return points.astype(np.float32), of


def double(tensor):
    return tensor.detach().double().numpy()


def layers(sequential, x):
    linears = [m for m in sequential if isinstance(m, torch.nn.Linear)]
    for number, linear in enumerate(linears):
        x = x @ double(linear.weight).T + double(linear.bias)
        x = x if number == len(linears) - 1 else np.maximum(x, 0)
    return x


def nearest_plainly(distances):
    return distances.argmin(axis=1)


def balanced_plainly(distances):
    """Sinkhorn-Knopp in NumPy, as many rounds as the library takes: columns, then rows, and the largest share."""
    rest = distances - distances.min(axis=1, keepdims=True)
    rest -= rest.min(axis=0)
    kernel = np.exp(-rest / (sinkhorn.EPSILON * rest.max()))
    columns = np.ones(kernel.shape[1])
    for _ in range(sinkhorn.ITERATIONS):
        columns = len(kernel) / kernel.shape[1] / (kernel.T @ (1 / (kernel @ columns)))
    return (kernel * columns / (kernel @ columns)[:, None]).argmax(axis=1)


def forward_plainly(net, x, assign=nearest_plainly):
    """METHOD 4 in float64: codes, every r_l, the sum of the codes' vectors and what the decoder makes of it."""
    r, rests, codes, total = layers(net.encoder, x), [], [], 0
    for book in net.codebooks:
        q = double(book)
        rests.append(r)
        codes.append(assign(((r[:, None] - q) ** 2).sum(axis=2)))
        total = total + q[codes[-1]]
        r = r - q[codes[-1]]
    return np.stack(codes, axis=1), [*rests, r], layers(net.decoder, total)


@pytest.mark.parametrize("balanced", [False, True])
def test_forward_and_every_loss_are_those_of_numpy(balanced):
    net, x = network(), vectors()
    found = net.losses(torch.from_numpy(x), balanced=balanced)
    codes, rests, decoded = forward_plainly(
        net, x.astype(np.float64), balanced_plainly if balanced else nearest_plainly
    )
    if balanced:  # else this would be the other case once more: items have moved, to more equal numbers at every level
        nearest = forward_plainly(net, x.astype(np.float64))[0]
        assert (codes != nearest).mean() > 0.1
        for level, size in enumerate((7, 5)):
            counts, of_nearest = (np.bincount(c[:, level], minlength=size) for c in (codes, nearest))
            assert counts.std() < of_nearest.std()
    assert found.reconstruction.item() == pytest.approx(((decoded - x) ** 2).mean(), rel=1e-5)
    left = sum((rests[level + 1] ** 2).mean() for level in range(2))
    assert found.codebook.item() == pytest.approx(left, rel=1e-5)
    assert found.commitment.item() == pytest.approx(left, rel=1e-5)
    diversity = 0.0
    for level, book in enumerate(net.codebooks):
        distances = ((rests[level][:, None] - double(book)) ** 2).sum(axis=2)
        weights = np.exp(-distances / distances.min(axis=1).mean())
        p = (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0)
        diversity += np.log(len(p)) + (p * np.log(p)).sum()
    assert found.diversity.item() == pytest.approx(diversity, rel=1e-4)
    assert found.total(0.25, 0.1).item() == pytest.approx(
        ((decoded - x) ** 2).mean() + 1.25 * left + 0.1 * diversity, rel=1e-5
    )


def test_gradients_reach_what_each_loss_is_for():
    net, x = network(), torch.from_numpy(vectors())
    parts = {"encoder": net.encoder, "decoder": net.decoder, "codebooks": net.codebooks}
    moved = {}
    for name in ("reconstruction", "codebook", "commitment", "diversity"):
        net.zero_grad()
        getattr(net.losses(x), name).backward()
        moved[name] = {
            part
            for part, module in parts.items()
            if any(p.grad is not None and p.grad.any() for p in module.parameters())
        }
    assert moved == {
        "reconstruction": {"encoder", "decoder"},  # straight through
        "codebook": {"codebooks"},
        "commitment": {"encoder"},
        "diversity": {"encoder", "codebooks"},
    }
    # straight through: the encoder sees the gradient at the decoder's input
    net.zero_grad()
    latents = net.encoder(x)
    codes, _, _ = forward_plainly(net, x.double().numpy())
    total = sum(book.detach()[torch.from_numpy(codes[:, level])] for level, book in enumerate(net.codebooks))
    total.requires_grad_()
    (at_decoder,) = torch.autograd.grad((net.decoder(total) - x).square().mean(), total)
    expected = torch.autograd.grad(latents, list(net.encoder.parameters()), at_decoder)
    net.losses(x).reconstruction.backward()
    for parameter, gradient in zip(net.encoder.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_codes_lengths_and_decoding_of_raw_vectors():
    net, x = network(), vectors(60) * 4
    x[3] = 0
    unit = x.astype(float) / np.maximum(np.linalg.norm(x.astype(float), axis=1, keepdims=True), 1e-30)
    inputs = (unit - double(net.mean_d)) / float(net.scale)
    codes, rests, decoded = forward_plainly(net, inputs)
    found, lengths = net.encode(x)
    assert np.array_equal(found, codes)
    np.testing.assert_allclose(lengths, np.stack([np.linalg.norm(r, axis=1) for r in rests], axis=1), rtol=1e-4)
    np.testing.assert_allclose(net.decode(codes), decoded * float(net.scale) + double(net.mean_d), atol=1e-5)


def test_neither_the_batch_nor_storing_changes_the_codes():
    net, x = network((40, 40)), vectors(300)
    net.codebooks[0].data[7] = net.codebooks[0].data[3]  # a tie: the lower code takes all
    codes, _ = net.encode(x)
    assert not (codes[:, 0] == 7).any()
    assert np.array_equal(np.concatenate([net.encode(row[None])[0] for row in x]), codes)
    stored = rqvae.from_tensors(net.tensors(), [book.detach().numpy() for book in net.codebooks])
    assert np.array_equal(stored.encode(x)[0], codes)
    assert np.array_equal(stored.decode(codes), net.decode(codes))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])])
@pytest.mark.parametrize("balanced", [False, True])
def test_planted_clusters_are_found(balanced, device):
    x, of = clusters()
    net, record = rqvae.fit(x, [6, 4], balanced=balanced, epochs=34, device=device, **(TINY | {"learning_rate": 0.01}))
    assert {tensor.device.type for tensor in net.state_dict().values()} == {"cpu"}  # codes are computed there
    codes, _ = net.encode(x)
    together = codes @ [4, 1]
    assert sum(max(np.bincount(of[together == k])) for k in np.unique(together)) / len(of) > 0.95
    assert record["held_out_error"] < 0.3  # the mean alone leaves about 1


def test_the_losses_are_computed_where_the_network_and_the_batch_are():
    """No tensor of another device takes part: the meta device refuses any, and computes nothing."""
    net, x = network().to("meta"), torch.from_numpy(vectors())
    loss = net.losses(x.to("meta")).total(0.25, 0.01)
    loss.backward()
    assert loss.device.type == "meta"
    with pytest.raises(RuntimeError, match="device"):
        net.losses(x)


def test_codebooks_start_from_k_means_on_the_encodings():
    net, x = network((5, 4)), torch.from_numpy(vectors(200))
    rqvae.start_codebooks(net, x, seed=0)
    rest = net.encoder(x).detach()
    for book in net.codebooks:
        codes = torch.cdist(rest, book.detach()).argmin(1)
        means = torch.stack([rest[codes == k].mean(0) for k in range(len(book))])
        # START_ROUNDS of Lloyd leave centres near the means of their points
        assert (means - book.detach()).norm() < 0.1 * means.norm()
        assert len(codes.unique()) == len(book)
        rest = rest - book.detach()[codes]


def test_codes_stay_in_use_when_training_begins():
    """From an untrained encoder, with the default's dropout, under five of 32 codes would be left after 100 steps."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((3000, 96)) * np.arange(1, 97) ** -0.5).astype(np.float32)
    settings = {"code_dim": 16, "hidden": [128, 64, 32], "batch_size": 512}
    _, record = rqvae.fit(x, [32, 32], epochs=34, **settings)
    at_100 = record["log"][0]
    assert at_100["step"] < 110
    assert min(at_100["perplexity"]) > 16
    assert at_100["held_out_error"] < record["error_of_the_mean"]


def test_dead_codes_are_moved_to_points_and_used_from_then_on():
    net, x = network((6, 6)), torch.from_numpy(vectors(200))
    net.codebooks[0].data[[1, 4]] = 1e3
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    net.losses(x).total(0.25, 0.01).backward()
    optimizer.step()
    torch.manual_seed(0)
    codes, rests = rqvae._assign(net, x)
    assert not np.isin(codes[:, 0], [1, 4]).any()
    before = net.codebooks[0].detach().clone()
    moved = rqvae.revive(net, optimizer, codes, rests)
    assert moved[0] >= 2
    for dead in (1, 4):
        assert (rests[0] == net.codebooks[0].detach()[dead]).all(dim=1).any()
        assert not optimizer.state[net.codebooks[0]]["exp_avg"][dead].any()
    used = torch.from_numpy(np.unique(codes[:, 0]))
    assert torch.equal(net.codebooks[0].detach()[used], before[used])
    assert {1, 4} <= set(rqvae._assign(net, x)[0][:, 0].tolist())


def test_training_stops_by_the_held_out_error_and_keeps_its_best(capsys):
    x, _ = clusters()
    net, record = rqvae.fit(x, [6, 4], epochs=500, **(TINY | {"patience": 2, "tolerance": 0.999}))
    steps = [entry["step"] for entry in record["log"]]
    assert record["stopped"].startswith("2 measurements without an improvement by 0.999")
    assert len(steps) == 3
    assert all(100 * n <= step < 100 * n + 7 for n, step in enumerate(steps, 1))
    best = min(record["log"], key=lambda entry: entry["held_out_error"])
    assert (record["best_step"], record["held_out_error"]) == (best["step"], best["held_out_error"])
    assert set(best) >= {"loss", "reconstruction", "codebook", "commitment", "diversity", "collision_rate"}
    assert len(best["utilisation"]) == len(best["perplexity"]) == 2
    # the network is that of the best step: its error over all items is near the one that was held out
    codes, _ = net.encode(x)
    error = np.square(residual.units(x) - net.decode(codes)).sum(axis=1).mean()
    assert error == pytest.approx(record["held_out_error"], rel=0.5)


def test_the_same_seed_gives_the_same_network_whatever_was_drawn_before():
    x, _ = clusters(120)
    nets = []
    for seed, drawn in ((3, 0), (3, 5), (4, 0)):
        torch.rand(drawn)
        nets.append(rqvae.fit(x, [5, 3], epochs=3, seed=seed, **TINY)[0])
    first, again, other = (net.state_dict() for net in nets)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["codebooks.0"], other["codebooks.0"])


def test_too_few_vectors_are_refused():
    x, _ = clusters(60)
    with pytest.raises(ValueError, match=r"level 0 has 60 distinct vectors for 61 codes: lower codebook_size"):
        rqvae.fit(x, [61], epochs=1, **TINY)
    with pytest.raises(ValueError, match=r"level 1 has \d+ distinct vectors for 30 codes"):
        rqvae.fit(np.repeat(x[:20], 3, axis=0), [20, 30], epochs=1, **TINY)


@pytest.mark.parametrize(
    ("learning_rate", "epochs", "batch_size", "match"),
    [
        # one step: its loss is from before it, and only the held-out error sees what it did
        (1e30, 1, 64, r"held-out error of the RQ-VAE became (nan|inf) at step 1 \(epoch 1, batch 1 of 1\): lower lear"),
        (
            1e30,
            1,
            16,
            r"the loss of the RQ-VAE became (nan|inf) at step 2 \(epoch 1, batch 2 of 4\): lower learning_rate=1e",
        ),
        (1e30, 30, 64, r"the loss of the RQ-VAE became (nan|inf) at step 2 \(epoch 2, batch 1 of 1\): lower"),
        # a number still, but any other item would do better
        (10.0, 3, 64, r"error is never less than \S+ \(step 3 of 3\), and random other items leave 1\.\d+: lower lear"),
    ],
)
def test_a_network_that_diverges_is_refused(learning_rate, epochs, batch_size, match):
    x, _ = clusters(60)
    settings = TINY | {"learning_rate": learning_rate, "batch_size": batch_size}
    with pytest.raises(ValueError, match=match):
        rqvae.fit(x, [4, 4], epochs=epochs, **settings)


def test_a_late_failure_says_how_to_have_the_best_network_before_it(monkeypatch):
    x, _ = clusters()
    whole, before = RqVae.losses, 0

    def spoilt(self, *arguments, **options):
        nonlocal before
        before += self.training
        losses = whole(self, *arguments, **options)
        return rqvae.Losses(*(part * (np.nan if before > 250 else 1.0) for part in vars(losses).values()))

    monkeypatch.setattr(RqVae, "losses", spoilt)
    with pytest.raises(ValueError, match="at step 251 ") as failed:
        rqvae.fit(x, [6, 4], epochs=100, **TINY)
    monkeypatch.undo()
    step, error, epochs = re.search(
        r"of step (\d+) \(held-out error (\S+)\) with epochs=(\d+)", str(failed.value)
    ).groups()
    _, record = rqvae.fit(x, [6, 4], epochs=int(epochs), **TINY)
    assert (record["best_step"], f"{record['held_out_error']:.4g}") == (int(step), error)


@pytest.mark.slow
def test_8192_codes_are_fitted_used_and_assigned_exactly():
    """It takes about 20 seconds of one core, most of them the products of the start and Sinkhorn's rounds."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2000, 16))[rng.integers(2000, size=20_000)] + 0.5 * rng.standard_normal((20_000, 16))
    x = x.astype(np.float32)
    settings = {"code_dim": 8, "hidden": [32], "learning_rate": 0.003, "balanced": True, "epochs": 1}
    net, record = rqvae.fit(x, [8192, 64], **settings)
    codes, _ = net.encode(x)
    used = [len(np.unique(codes[:, level])) for level in (0, 1)]
    assert used[0] > 0.4 * 8192  # ten steps behind the start, and before codes without items could move
    assert used[1] == 64
    _, bucket, counts = np.unique(codes, axis=0, return_inverse=True, return_counts=True)
    assert (counts[bucket] > 1).mean() < 0.35
    assert record["log"][-1]["revived"][0] > 0
    assert np.array_equal(net.encode(x[:100])[0], codes[:100])
    unit = x[:100].astype(float) / np.linalg.norm(x[:100].astype(float), axis=1, keepdims=True)
    expected, _, _ = forward_plainly(net, (unit - double(net.mean_d)) / float(net.scale))
    assert np.array_equal(codes[:100], expected)
