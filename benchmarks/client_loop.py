"""A step of FedNest against the same as one would write it in PyTorch: a loop over clients with autograd.

The same experiment (`representation.py`): cohorts, batches, epochs, anchors, products and local steps. Data
are tensors in memory. Batches are read by index, or by the usual `DataLoader`; evaluation is left out.

    python benchmarks/client_loop.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from representation import (
    BATCH,
    CLASSES,
    CLIENTS,
    COHORT,
    EPOCHS,
    HIDDEN,
    INPUTS,
    LOWER_LR,
    PENALTY,
    SAMPLES,
    SMOOTHNESS,
    STEPS,
    TERMS,
    UPPER_LR,
    Steps,
    federated,
    method,
    problem,
    table,
)
from timing import best_seconds, figure, milliseconds
from torch.utils.data import DataLoader, TensorDataset

Tensors = tuple[torch.Tensor, ...]
Batches = Callable[[TensorDataset], Iterator[Any]]


def by_index(data: TensorDataset) -> Iterator[Any]:
    """A shuffled pass, by index."""
    inputs, labels = data.tensors
    for rows in torch.randperm(len(labels)).split(BATCH):
        yield inputs[rows], labels[rows]


def by_loader(data: TensorDataset) -> Iterator[Any]:
    """A shuffled pass, by PyTorch's own loader."""
    return iter(DataLoader(data, batch_size=BATCH, shuffle=True))


class Loop:
    """Steps of FedNest, one client after another."""

    def __init__(self, batches: Batches, steps: int) -> None:
        self.batches, self.steps = batches, steps
        self.train, self.validation = (
            [TensorDataset(*own) for own in zip(*_tensors(table(CLIENTS, SAMPLES, seed)), strict=True)]
            for seed in (0, 1)
        )
        hidden, head = torch.nn.Linear(INPUTS, HIDDEN), torch.nn.Linear(HIDDEN, CLASSES)
        self.x0, self.y0 = (tuple(p.detach() for p in layer.parameters()) for layer in (hidden, head))

    def __call__(self) -> tuple[Tensors, Tensors]:
        x, y = self.x0, self.y0
        for index in range(self.steps):
            x, y = self.step(x, y, index % TERMS)
        return x, y

    def step(self, x: Tensors, y: Tensors, products: int) -> tuple[Tensors, Tensors]:
        """One round: FedInn, then FedOut; the number of products is not drawn, so that its mean is right."""
        cohort = self.cohort()
        anchor = mean([self.lower_gradient(x, y, self.batch(self.train[i])) for i in cohort])
        y = mean([self.inner(i, x, y, anchor) for i in cohort])
        u = self.adjoint(x, y, products)
        h = mean([self.hypergradient(i, x, y, u) for i in cohort])
        return mean([self.outer(i, x, y, h) for i in cohort]), y

    def cohort(self) -> list[int]:
        return torch.randperm(CLIENTS)[:COHORT].tolist()

    def batch(self, data: TensorDataset) -> Any:
        return next(iter(self.batches(data)))

    def inner(self, client: int, x: Tensors, y: Tensors, anchor: Tensors) -> Tensors:
        """Local epochs on y with an anchor."""
        own = y
        for _ in range(EPOCHS):
            for batch in self.batches(self.train[client]):
                there = self.lower_gradient(x, own, batch)
                here = self.lower_gradient(x, y, batch)
                lr = LOWER_LR * len(batch[1]) / BATCH
                own = tuple(p - lr * (a - b + q) for p, a, b, q in zip(own, there, here, anchor, strict=True))
        return own

    def adjoint(self, x: Tensors, y: Tensors, products: int) -> Tensors:
        """A sampled term of the series: every product at new clients."""
        right = mean([self.upper_gradient(i, x, y) for i in self.cohort()])
        u = tuple(TERMS / SMOOTHNESS * p for p in right)
        for _ in range(products):
            product = mean([self.curvature(i, x, y, u) for i in self.cohort()])
            u = tuple(p - q / SMOOTHNESS for p, q in zip(u, product, strict=True))
        return u

    def lower_gradient(self, x: Tensors, y: Tensors, batch: Any) -> Tensors:
        y = variables(y)
        return torch.autograd.grad(lower(x, y, batch), y)

    def upper_gradient(self, client: int, x: Tensors, y: Tensors) -> Tensors:
        y = variables(y)
        return torch.autograd.grad(upper(x, y, self.batch(self.validation[client])), y)

    def curvature(self, client: int, x: Tensors, y: Tensors, v: Tensors) -> Tensors:
        y = variables(y)
        gradient = torch.autograd.grad(lower(x, y, self.batch(self.train[client])), y, create_graph=True)
        return torch.autograd.grad(gradient, y, v)

    def hypergradient(self, client: int, x: Tensors, y: Tensors, u: Tensors) -> Tensors:
        x, y = variables(x), variables(y)
        direct = torch.autograd.grad(upper(x, y, self.batch(self.validation[client])), x)
        gradient = torch.autograd.grad(lower(x, y, self.batch(self.train[client])), y, create_graph=True)
        indirect = torch.autograd.grad(gradient, x, u)
        return tuple(p - q for p, q in zip(direct, indirect, strict=True))

    def outer(self, client: int, x: Tensors, y: Tensors, h: Tensors) -> Tensors:
        """One local step on x with an anchor."""
        batch = self.batch(self.validation[client])
        here, there = variables(x), variables(x)
        a = torch.autograd.grad(upper(there, y, batch), there)
        b = torch.autograd.grad(upper(here, y, batch), here)
        return tuple(p - UPPER_LR * (i - j + q) for p, i, j, q in zip(x, a, b, h, strict=True))


def upper(x: Tensors, y: Tensors, batch: Any) -> torch.Tensor:
    """The loss of the network."""
    inputs, labels = batch
    return F.cross_entropy(F.linear(F.relu(F.linear(inputs, *x)), *y), labels)


def lower(x: Tensors, y: Tensors, batch: Any) -> torch.Tensor:
    """The same with a penalty of the head."""
    return upper(x, y, batch) + PENALTY / 2 * sum((p**2).sum() for p in y)


def variables(tensors: Tensors) -> Tensors:
    """The same numbers, to differentiate by."""
    return tuple(p.detach().requires_grad_() for p in tensors)


def mean(values: list[Tensors]) -> Tensors:
    """The mean over clients."""
    return tuple(torch.stack(own).mean(0) for own in zip(*values, strict=True))


def _tensors(columns: dict[str, Any]) -> Iterator[torch.Tensor]:
    yield torch.from_numpy(columns["inputs"])
    yield torch.from_numpy(columns["labels"]).long()


def with_threads(threads: int, loop: Loop) -> Callable[[], Any]:
    """The loop with so many threads."""

    def run() -> Any:
        torch.set_num_threads(threads)
        return loop()

    return run


def main() -> None:
    """Print the ratios."""
    ours, kinds = Steps(problem(), federated(), method()), {"index": by_index, "DataLoader": by_loader}
    for (name, batches), threads in itertools.product(kinds.items(), (1, 2)):
        torch.manual_seed(0)
        best = best_seconds({"ours": ours, "PyTorch": with_threads(threads, Loop(batches, TERMS))}, repeats=2)
        own, other = best["ours"] / STEPS, best["PyTorch"] / TERMS
        about = {"step_milliseconds": {"ours": milliseconds(own), "PyTorch": milliseconds(other)}}
        what = f"FedNest step, times as fast as a PyTorch loop over clients ({threads} threads, {name})"
        figure(what, other / own, at_least=10, **about)


if __name__ == "__main__":
    main()
