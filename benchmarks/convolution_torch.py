"""Convolutional clients, each with weights of its own, against PyTorch: gradients and products with Hessians.

The four layers of `FourLayerCNN` on small colour images (32 × 32 × 3), 10 clients. PyTorch: one client after
another, `torch.func.vmap`, and one grouped convolution for all clients, with one thread and with two; the
best of them counts. All get the same weights and images, and their results are compared. Ours, as a client's
oracles: all clients at once, one by one (`chunk=1`), and that in blocks of 8 samples (`block=8`).

    python benchmarks/convolution_torch.py [clients] [samples] [filters]
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import torch
import torch.nn.functional as F
from timing import best_seconds, figure, milliseconds

import fedbilevel as fb
from fedbilevel.data.batches import Batch
from fedbilevel.problem import Client
from fedbilevel.problem.cnn4 import FourLayerCNN

INPUTS, CLASSES = (32, 32, 3), 10
BLOCK = 8
PADS, POOLED = (1, 1, 1, 0), 3
Tensors = tuple[torch.Tensor, ...]


# ------------------------------------------------------------------ ours


def oracle(model: FourLayerCNN, clients: fb.Clients, block: int | None, what: str) -> Any:
    """One client's gradient or product with the Hessian, as algorithms ask for them."""
    problem = fb.Classification(model, inputs=INPUTS, classes=CLASSES, block=block)
    me = Client(problem, clients, 0, 0, jr.key(0))
    if what == "gradient":
        return lambda parameters, direction, samples: me.g_y((), parameters, Batch(samples))
    return lambda parameters, direction, samples: me.g_yy((), parameters, direction, Batch(samples))


def ours(model: FourLayerCNN, clients: fb.Clients, what: str) -> dict[str, Any]:
    """What all clients compute: all at once, one by one, and that in blocks of samples."""

    def one_by_one(block: int | None) -> Any:
        one = oracle(model, clients, block, what)
        return jax.jit(lambda *rows: jax.lax.map(lambda own: one(*own), rows))

    together = jax.jit(jax.vmap(oracle(model, clients, None, what)))
    return {"together": together, "one by one": one_by_one(None), f"blocks of {BLOCK}": one_by_one(BLOCK)}


# -------------------------------------------------------------- PyTorch's


def torch_loss(parameters: Tensors, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """One client's loss: weights and biases of four convolutions and a linear head."""
    for place, pad in enumerate(PADS):
        images = F.conv2d(images, *parameters[2 * place : 2 * place + 2], padding=pad)
        images = F.relu(F.max_pool2d(images, 2) if place < POOLED else images)
    return F.cross_entropy(F.linear(images.flatten(1), *parameters[8:]), labels)


def grouped_loss(parameters: Tensors, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum of all clients' losses, a group of channels for each client."""
    clients, samples = labels.shape
    z = images.transpose(0, 1).flatten(1, 2)
    for place, pad in enumerate(PADS):
        weight, bias = parameters[2 * place : 2 * place + 2]
        z = F.conv2d(z, weight.flatten(0, 1), bias.flatten(), padding=pad, groups=clients)
        z = F.relu(F.max_pool2d(z, 2) if place < POOLED else z)
    features = z.reshape(samples, clients, -1).transpose(0, 1)
    logits = torch.baddbmm(parameters[9].unsqueeze(1), features, parameters[8].transpose(1, 2))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / samples


def of_loss(
    loss: Callable[..., torch.Tensor], parameters: Tensors, direction: Tensors | None, *batch: torch.Tensor
) -> Tensors:
    """A gradient, or with a direction the product of the Hessian with it, by differentiating twice."""
    parameters = tuple(p.detach().requires_grad_() for p in parameters)
    gradient = torch.autograd.grad(loss(parameters, *batch), parameters, create_graph=direction is not None)
    return gradient if direction is None else torch.autograd.grad(gradient, parameters, direction)


def client_loop(parameters: Tensors, direction: Tensors | None, *batch: torch.Tensor) -> Tensors:
    """One client after another."""
    own = []
    for i in range(len(batch[0])):
        along = None if direction is None else tuple(d[i] for d in direction)
        own.append(of_loss(torch_loss, tuple(p[i] for p in parameters), along, *(part[i] for part in batch)))
    return tuple(map(torch.stack, zip(*own, strict=True)))


def with_vmap(parameters: Tensors, direction: Tensors | None, *batch: torch.Tensor) -> Tensors:
    """All clients by `torch.func`."""
    gradient = torch.func.grad(torch_loss)

    def product(parameters: Tensors, direction: Tensors, *batch: torch.Tensor) -> Tensors:
        return torch.func.jvp(lambda own: gradient(own, *batch), (parameters,), (direction,))[1]

    if direction is None:
        return torch.func.vmap(gradient)(parameters, *batch)
    return torch.func.vmap(product)(parameters, direction, *batch)


def theirs() -> dict[str, Any]:
    """The three ways."""
    grouped = functools.partial(of_loss, grouped_loss)
    return {"client loop": client_loop, "vmap": with_vmap, "grouped": grouped}


# ------------------------------------------------------------- both of them


def as_torch(tree: Any, model: FourLayerCNN) -> Tensors:
    """Weights as PyTorch lays them out."""
    flat = []
    for own in tree["layers"]:
        flat += [np.moveaxis(np.asarray(own["weight"]), (1, 2, 3, 4), (3, 4, 2, 1)), np.asarray(own["bias"])]
    side = 3
    weight = np.asarray(tree["head"]["weight"]).reshape(-1, side, side, model.filters, CLASSES)
    head = np.moveaxis(weight, (1, 2, 3, 4), (3, 4, 2, 1)).reshape(len(weight), CLASSES, -1)
    return tuple(torch.from_numpy(np.array(p)) for p in (*flat, head, tree["head"]["bias"]))


def main(clients: int = 10, samples: int = 32, filters: int = 64) -> None:
    """Print the ratios."""
    model = FourLayerCNN(filters=filters)
    init = jax.vmap(lambda key: model.init(key, INPUTS)[0])
    parameters, direction = (init(jr.split(jr.key(seed), clients)) for seed in (0, 1))
    draws = np.random.default_rng(0)
    images = draws.random((clients, samples, *INPUTS), np.float32)
    labels = draws.integers(CLASSES, size=(clients, samples))
    table = {"inputs": jnp.asarray(images), "labels": jnp.asarray(labels, jnp.int32)}
    arguments = parameters, direction, table
    weights, along = as_torch(parameters, model), as_torch(direction, model)
    batch = torch.from_numpy(np.moveaxis(images, -1, 2).copy()), torch.from_numpy(labels)
    for what in ("gradient", "product"):
        ways = ours(model, fb.Clients(table), what)
        own = best_seconds(ways, arguments, repeats=3)
        towards = None if what == "gradient" else along
        found = as_torch(ways[f"blocks of {BLOCK}"](*arguments), model)
        for way in theirs().values():
            _check_alike(found, way(weights, towards, *batch))
        other = {}
        for threads in (1, 2):
            torch.set_num_threads(threads)
            best = best_seconds(theirs(), (weights, towards, *batch), repeats=3)
            other |= {f"{name}, {threads} threads": seconds for name, seconds in best.items()}
        times = {name: milliseconds(seconds) for name, seconds in (own | other).items()}
        ratio = min(other.values()) / min(own.values())
        figure(
            f"CNN of 10 clients, {what}: times as fast as PyTorch's best",
            ratio,
            at_least=1,
            milliseconds=times,
        )


def _check_alike(ours: Tensors, theirs: Tensors) -> None:
    """In the mean: a pixel that is the largest by rounding alone may be another one there."""
    for a, b in zip(ours, theirs, strict=True):
        if float((a - b).norm() / a.norm()) > 0.02:
            raise AssertionError("PyTorch's network is another one than ours: the results differ")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
