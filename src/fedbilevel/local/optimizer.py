"""Optimisers that a client runs: optax's, named, so that another machine can make the same one."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import optax

from fedbilevel.schedule import Rate, rate
from fedbilevel.tree import PyTree


class Optimizer(eqx.Module):
    """A rule for steps along gradients: makes an optax transformation wherever it is needed."""

    @abc.abstractmethod
    def transformation(self) -> optax.GradientTransformation:
        """The rule as optax has it."""

    def init(self, parameters: PyTree) -> tuple[Any, ...]:
        """The memory of the rule before the first step, as plain arrays."""
        return tuple(jax.tree.leaves(self.transformation().init(parameters)))

    def step(self, parameters: PyTree, gradient: PyTree, memory: Any) -> tuple[PyTree, tuple[Any, ...]]:
        """New parameters and memory."""
        rule = self.transformation()
        structure: Any = jax.tree.structure(jax.eval_shape(rule.init, parameters))
        updates, new = rule.update(gradient, jax.tree.unflatten(structure, memory), parameters)
        return optax.apply_updates(parameters, updates), tuple(jax.tree.leaves(new))


class Named(Optimizer):
    """One of optax by name; `Adam` and `SGD` make such. Its numbers are leaves: others compile nothing new.

    Args:
        name: such as "adam".
        settings: its arguments.
        penalty: μ, added to the gradient as `μ · parameters` (the gradient of `(μ/2)‖parameters‖²`).
    """

    name: str = eqx.field(static=True)
    settings: dict[str, Any]
    penalty: Any = 0.0

    def transformation(self) -> optax.GradientTransformation:
        rule = getattr(optax, self.name)(**self.settings)
        return optax.chain(optax.add_decayed_weights(self.penalty), rule)

    def __repr__(self) -> str:
        settings = self.settings | {"penalty": self.penalty}
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in settings.items())})"


class PerBlock(Optimizer):
    """Another rule for every block of the parameters, by their first key.

    Args:
        blocks: key -> optimiser.

    Example:
        >>> import jax.numpy as jnp
        >>> rule = PerBlock({"classes": SGD(0.1), "mixture": SGD(1.0)})
        >>> ones = {"classes": jnp.ones(1), "mixture": jnp.ones(1)}
        >>> moved, _ = rule.step(ones, ones, rule.init(ones))
        >>> [round(float(block[0]), 3) for block in moved.values()]
        [0.9, 0.0]
    """

    blocks: Mapping[str, Optimizer]

    def transformation(self) -> optax.GradientTransformation:
        rules = {name: optimizer(rule).transformation() for name, rule in self.blocks.items()}
        return optax.multi_transform(rules, self._labels)

    def _labels(self, parameters: PyTree) -> PyTree:
        if not isinstance(parameters, Mapping) or set(parameters) != set(self.blocks):
            found = f"the blocks {sorted(parameters)}" if isinstance(parameters, Mapping) else "no blocks"
            raise ValueError(
                f"there are optimisers for the blocks {sorted(self.blocks)}, but the variable has {found}"
            )
        return {name: name for name in parameters}


class Raw(Optimizer):
    """An optax transformation as it is: it cannot be sent to another process."""

    rule: optax.GradientTransformation = eqx.field(static=True)
    stays_here: ClassVar[str] = (
        "a transformation of optax is a closure, which cannot travel to another process or into a file: "
        "use fedbilevel.Adam(...) or fedbilevel.SGD(...) in its place"
    )

    def transformation(self) -> optax.GradientTransformation:
        return self.rule


def Adam(
    learning_rate: Rate, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, penalty: float = 0.0
) -> Named:
    """Adam, by optax.

    Args:
        learning_rate: the step size; a number, or an optax schedule of the algorithm's step (its round).
        b1, b2: decay of the first and second moments.
        eps: added to the root of the second moment.
        penalty: μ of an L2 term `(μ/2)‖parameters‖²`.

    Reference: D. Kingma, J. Ba, Adam: a method for stochastic optimization, ICLR 2015.
    """
    return Named("adam", {"learning_rate": rate(learning_rate), "b1": b1, "b2": b2, "eps": eps}, penalty)


def SGD(learning_rate: Rate, momentum: float | None = None, penalty: float = 0.0) -> Named:
    """Gradient descent, perhaps with momentum, by optax.

    Args:
        learning_rate: as for `Adam`.
        momentum: the share of the last direction that is kept; None: no momentum.
        penalty: as for `Adam`.
    """
    settings = {"learning_rate": rate(learning_rate)} | ({} if momentum is None else {"momentum": momentum})
    return Named("sgd", settings, penalty)


def optimizer(value: Any) -> Optimizer:
    """An `Optimizer` of what a user may give: one of these, or a transformation of optax."""
    if isinstance(value, Optimizer):
        return value
    if isinstance(value, optax.GradientTransformation):
        return Raw(value)
    if isinstance(value, Mapping):
        return PerBlock({name: optimizer(rule) for name, rule in value.items()})
    raise TypeError(f"an optimiser is {value!r}; give one such as fedbilevel.Adam(0.1) or optax.adam(0.1)")
