"""Cross-entropy over a large vocabulary, a few rows of logits at a time, without holding them all.

Shapes: M supervised positions · D model width · V rows of all weight blocks together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

LOGITS_AT_ONCE = 16 * 1024 * 1024  # entries of the logits held at a time: 64 MB in float32


def chunked_cross_entropy(
    hidden_MD: torch.Tensor, blocks: Sequence[torch.Tensor], targets_M: torch.Tensor
) -> torch.Tensor:
    """Mean cross-entropy of ``hidden_MD @ cat(blocks).T`` against ``targets_M``, a float32 scalar.

    ``blocks`` [V_i, D] are the output matrix in pieces, in vocabulary order. Gradients go to the hidden states
    and to those blocks that ask for one: with a frozen base block nothing of size V x D is formed. Logits are
    formed a chunk of positions at a time; the gradients are computed with them, so nothing is formed twice.
    """
    return _ChunkedCrossEntropy.apply(hidden_MD, targets_M, *blocks)  # pyright: ignore[reportReturnType]


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_MD: torch.Tensor, targets_M: torch.Tensor, *blocks: torch.Tensor) -> torch.Tensor:
        wanted = [block.requires_grad for block in blocks]
        with torch.autocast(hidden_MD.device.type, enabled=False):
            loss, hidden_grad, block_grads = _loss_and_gradients(hidden_MD, blocks, targets_M, wanted)
        ctx.save_for_backward(hidden_grad, *(g for g in block_grads if g is not None))
        ctx.wanted = wanted
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grad_outputs
        hidden_grad, *block_grads = ctx.saved_tensors
        scaled = iter(block_grad.mul_(grad) for block_grad in block_grads)  # in place: V x D numbers are read once
        return (hidden_grad * grad.to(hidden_grad.dtype), None, *(next(scaled) if w else None for w in ctx.wanted))


def _loss_and_gradients(
    hidden_MD: torch.Tensor, blocks: Sequence[torch.Tensor], targets_M: torch.Tensor, wanted: list[bool]
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor | None]]:
    """The loss and its gradients; products in the dtype of the hidden states, softmax and sums in float32."""
    M = len(targets_M)
    weights = [block.detach().to(hidden_MD.dtype) for block in blocks]
    sizes = [len(weight) for weight in weights]
    hidden_grad = torch.empty_like(hidden_MD)
    block_grads: list[torch.Tensor | None] = [None] * len(blocks)
    loss = torch.zeros((), device=hidden_MD.device)
    for at in torch.arange(M, device=hidden_MD.device).split(max(LOGITS_AT_ONCE // sum(sizes), 1)):
        chunk = hidden_MD[at]
        products = [chunk @ weight.T for weight in weights]
        logits = (products[0] if len(products) == 1 else torch.cat(products, dim=1)).float()
        target = targets_M[at, None]
        logits -= logits.amax(dim=1, keepdim=True)
        loss -= logits.gather(1, target).sum()
        # One pass of exponentials serves the loss and the gradient; torch.logsumexp alone takes three times that.
        total = logits.exp_().sum(dim=1, keepdim=True)
        loss += total.log().sum()
        # From here on `logits` holds the gradient of the mean loss by the logits: (softmax - one-hot) / M.
        logits.div_(total * M).scatter_add_(1, target, logits.new_full(target.shape, -1.0 / M))
        pieces = logits.to(hidden_MD.dtype).split(sizes, dim=1)
        hidden_grad[at] = sum(piece @ weight for piece, weight in zip(pieces, weights, strict=True))
        for i in [i for i, w in enumerate(wanted) if w]:
            part = pieces[i].T @ chunk
            earlier = block_grads[i]
            block_grads[i] = part.float() if earlier is None else earlier.add_(part)
    return loss / M, hidden_grad, block_grads
