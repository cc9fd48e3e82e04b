"""An outer step of PDBO against the same as one would write it in PyTorch: a loop over nodes with autograd.

The `TwoLayerCNN` on images of 28 × 28 pixels, links that come and go, hypergradient push with reduced
variance, batches of 32, T = 60 lower steps and M = 20 rounds: minutes. One node after another on our side too
(`chunk=1`), which is what the simulator advises for convolutions on a CPU. How near our step is to the speed
of a matrix product, how near one would be that is three times as fast as PyTorch's, and how fast the step's
matrix products are by themselves. Then our step with 10 and 100 nodes: time for each node.

    python benchmarks/pdbo_torch.py [nodes] [lower_steps] [terms]
"""

from __future__ import annotations

import sys
import time
from typing import Any

import jax.random as jr
import torch
import torch.nn.functional as F
from pdbo import INPUTS, begun, method, nodes, outer_step
from pdbo_work import CLASSES, SAMPLES, needed, seconds_alone
from roofline import SQUARE, flops, products
from timing import best_seconds, figure

import fedbilevel as fb

LOWER_LR, UPPER_LR, PENALTY, KEEP, RENEW = 0.05, 0.1, 0.001, 0.9, 0.1
FEW, MANY = 10, 100
TIMES_AS_FAST = 3
Tensors = tuple[torch.Tensor, ...]


class Loop:
    """Outer steps, one node after another."""

    def __init__(self, count: int, lower_steps: int, terms: int) -> None:
        self.count, self.lower_steps, self.terms = count, lower_steps, terms
        self.images = torch.rand(count, 2 * SAMPLES, 1, *INPUTS[:2])
        self.labels = torch.randint(CLASSES, (count, 2 * SAMPLES))
        self.x = [torch.zeros(CLASSES, requires_grad=True) for _ in range(count)]
        self.adam = [torch.optim.Adam([x], lr=UPPER_LR) for x in self.x]
        self.y0 = tuple(p.detach() for p in network().parameters())
        self.y, self.w = [self.y0] * count, torch.ones(count)
        self.receive = self.links().T

    def links(self) -> torch.Tensor:
        """Weights that each node gives to those that hear it now; its column sums to one."""
        there = (torch.rand(self.count, self.count) < 0.4).float()
        there.fill_diagonal_(1)
        return there / there.sum(0)

    def step(self) -> None:
        """The hypergradient of every node, a step of its Adam, and the lower level anew."""
        for x, adam, h in zip(self.x, self.adam, self.hypergradients(), strict=True):
            x.grad = h
            adam.step()
        self.descend()

    def descend(self) -> None:
        """T steps of stochastic gradient push, from the start."""
        z, w = [self.y0] * self.count, torch.ones(self.count)
        for _ in range(self.lower_steps):
            own = [self.lower_gradient(i, tuple(p / w[i] for p in z[i])) for i in range(self.count)]
            links = self.links()
            mixed, w = mix(links, z), links @ w
            z = [moved(a, LOWER_LR, b) for a, b in zip(mixed, own, strict=True)]
        self.y, self.w = [tuple(p / w[i] for p in z[i]) for i in range(self.count)], w

    def hypergradients(self) -> list[torch.Tensor]:
        """M rounds of hypergradient push."""
        c = [tuple(p / self.count / self.w[i] for p in self.upper_gradient(i)) for i in range(self.count)]
        u, w, v = list(c), list(c), [torch.zeros(CLASSES)] * self.count
        for _ in range(self.terms):
            links = (self.links() != 0).float() * self.receive
            u_in, w_in = mix(links, u), mix(links, w)
            products = [self.products(i, u[i], w[i]) for i in range(self.count)]
            for i, ((ju, hu), (jw, hw)) in enumerate(products):
                lr = LOWER_LR / float(self.w[i])
                v[i] = KEEP * v[i] - LOWER_LR * (KEEP * ju + (1 - KEEP) * jw)
                new, anew = moved(u_in[i], lr, hu), moved(w_in[i], lr, hw)
                rest = zip(anew, c[i], w[i], new, strict=True)
                w[i] = tuple(RENEW * (a + b) + (1 - RENEW) * (d + e) for a, b, d, e in rest)
                u[i] = new
        return v

    def lower_gradient(self, node: int, y: Tensors) -> Tensors:
        y = tuple(p.detach().requires_grad_() for p in y)
        return torch.autograd.grad(lower(self.x[node].detach(), y, *self.batch(node)), y)

    def upper_gradient(self, node: int) -> Tensors:
        y = tuple(p.detach().requires_grad_() for p in self.y[node])
        images, labels = self.batch(node)
        return torch.autograd.grad(F.cross_entropy(logits(y, images), labels), y)

    def products(self, node: int, *vectors: Tensors) -> list[tuple[torch.Tensor, Tensors]]:
        """`J v` and `H v` of each vector: one gradient that is differentiated once for each."""
        x = self.x[node].detach().requires_grad_()
        y = tuple(p.detach().requires_grad_() for p in self.y[node])
        gradient = torch.autograd.grad(lower(x, y, *self.batch(node)), y, create_graph=True)
        both = [torch.autograd.grad(gradient, (x, *y), v, retain_graph=True) for v in vectors]
        return [(found[0], found[1:]) for found in both]

    def batch(self, node: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.randint(2 * SAMPLES, (SAMPLES,))
        return self.images[node, rows], self.labels[node, rows]


def network() -> torch.nn.Module:
    """The parameters of two convolutions and two dense layers."""
    layers = torch.nn.Conv2d(1, 32, 5), torch.nn.Conv2d(32, 64, 5)
    return torch.nn.Sequential(*layers, torch.nn.Linear(1024, 2048), torch.nn.Linear(2048, CLASSES))


def logits(y: Tensors, images: torch.Tensor) -> torch.Tensor:
    """28 → 24 → 12 → 8 → 4 pixels, 1024 → 2048 → 62."""
    for place in (0, 2):
        images = F.relu(F.max_pool2d(F.conv2d(images, y[place], y[place + 1]), 2))
    return F.linear(F.relu(F.linear(images.flatten(1), *y[4:6])), *y[6:])


def lower(x: torch.Tensor, y: Tensors, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The training loss with the node's own weights of the classes."""
    weights = CLASSES * torch.softmax(x, 0)[labels]
    loss = F.cross_entropy(logits(y, images), labels, reduction="none")
    return (weights * loss).mean() + PENALTY / 2 * sum((p**2).sum() for p in y)


def mix(links: torch.Tensor, values: list[Tensors]) -> list[Tensors]:
    """What every node receives."""
    mixed = [torch.tensordot(links, torch.stack(own), 1) for own in zip(*values, strict=True)]
    return [tuple(p[i] for p in mixed) for i in range(len(values))]


def moved(a: Tensors, lr: float, direction: Tensors) -> Tensors:
    """`a − lr · direction`."""
    return tuple(p - lr * d for p, d in zip(a, direction, strict=True))


def our_step(count: int, lower_steps: int, terms: int) -> Any:
    """Our outer step and what it is called with."""
    problem = fb.ClassWeights(fb.TwoLayerCNN(CLASSES), inputs=INPUTS, classes=CLASSES, penalty=PENALTY)
    pdbo = method(count, lower_steps, terms, local=False)
    fed = fb.Simulator(chunk=1).federation(problem, nodes(count, SAMPLES))
    return outer_step(pdbo), (fed, begun(pdbo, fed, jr.key(0)), jr.key(1))


def our_seconds(count: int, lower_steps: int, terms: int) -> float:
    """The best time of our outer step."""
    step, arguments = our_step(count, lower_steps, terms)
    best: float = best_seconds({"": step}, arguments, repeats=1)[""]
    return best


def their_seconds(count: int, lower_steps: int, terms: int, threads: int) -> float:
    """The time of one step of the loop; a short one before warms it up."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    Loop(count, 1, 1).step()
    loop = Loop(count, lower_steps, terms)
    begin = time.perf_counter()
    loop.step()
    return time.perf_counter() - begin


def main(count: int = 10, lower_steps: int = 60, terms: int = 20) -> None:
    """Print the ratios."""
    sizes = count, lower_steps, terms
    ours = our_seconds(*sizes)
    theirs = [compared(ours, their_seconds(*sizes, threads), count, threads) for threads in (1, 2)]
    roofline(ours, min(theirs), needed(*sizes), count)
    products_alone(ours, min(theirs), *sizes)
    growth()


def compared(ours: float, theirs: float, count: int, threads: int) -> float:
    """Print how many times as fast we are; their seconds."""
    what = f"PDBO step of {count} nodes, times as fast as a PyTorch loop over nodes ({threads} threads)"
    seconds = {"ours": round(ours, 2), "PyTorch": round(theirs, 2)}
    figure(what, theirs / ours, at_least=TIMES_AS_FAST, seconds=seconds)
    return theirs


def roofline(ours: float, theirs: float, work: float, count: int) -> None:
    """Print our share of the speed of a matrix product, and what three times PyTorch's best would be."""
    square = flops(SQUARE) / best_seconds({"": products(SQUARE)}, repeats=15)[""]
    about: dict[str, Any] = {
        "needed_gigaflops": round(work / 1e9),
        "gigaflops_a_second": {"step": round(work / ours / 1e9), "square": round(square / 1e9)},
        "share_that_the_target_needs": round(TIMES_AS_FAST * work / theirs / square, 2),
    }
    what = f"PDBO step of {count} nodes, FLOP/s over a matrix product's of 2048 × 2048"
    figure(what, work / ours / square, **about)


def products_alone(ours: float, theirs: float, *sizes: int) -> None:
    """Print how many times as fast as PyTorch's best a step would be that is nothing but its products."""
    alone = seconds_alone(*sizes)
    what = (
        f"the matrix products of a PDBO step of {sizes[0]} nodes alone, times as fast as PyTorch's best step"
    )
    figure(what, theirs / alone, seconds={"products": round(alone, 2), "our step": round(ours, 2)})


def growth() -> None:
    """Print how the time for a node grows with the number of nodes."""
    short = {side: our_seconds(side, 3, 1) for side in (FEW, MANY)}
    seconds = {f"{side} nodes": round(seconds, 2) for side, seconds in short.items()}
    what = f"PDBO step (T = 3, M = 1), time for a node of {MANY} over that of {FEW}"
    figure(what, short[MANY] / MANY / (short[FEW] / FEW), seconds=seconds)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
