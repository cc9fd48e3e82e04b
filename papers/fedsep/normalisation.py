"""How fast a narrow residual network learns, by its normalisation: all samples in one place.

Prints the test accuracy of table 1's small network after some steps of Adam on batches of ten digits.

    python papers/fedsep/normalisation.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax

from fedbilevel.data.source import load
from fedbilevel.problem.accuracy import cross_entropy
from fedbilevel.problem.resnet import ResNet

BATCH, SHOWN, TESTED = 10, (50, 100, 200, 400), 1000
SETTINGS = (("group", 1e-3), ("group", 3e-3), ("group", 1e-2), ("batch", 3e-3), ("none", 3e-3))


def curve(norm: str, learning_rate: float, train: Any, test: Any) -> list[float]:
    """Test accuracies after the steps `SHOWN`."""
    model = ResNet(channels=(16, 32), blocks=(1, 1), stride=2, norm=norm)
    rule, draw = optax.adam(learning_rate), np.random.default_rng(0)
    parameters, _ = model.init(jr.key(0), train["inputs"].shape[1:])
    state = rule.init(parameters)

    @jax.jit
    def step(parameters: Any, state: Any, inputs: Any, labels: Any) -> Any:
        def loss(parameters: Any) -> Any:
            return jnp.mean(cross_entropy(model(parameters, inputs), labels))

        update, state = rule.update(jax.grad(loss)(parameters), state)
        return optax.apply_updates(parameters, update), state

    @jax.jit
    def accuracy(parameters: Any) -> Any:
        return jnp.mean(jnp.argmax(model(parameters, test["inputs"]), axis=-1) == test["labels"])

    found = []
    for number in range(1, SHOWN[-1] + 1):
        rows = draw.choice(len(train["labels"]), BATCH, replace=False)
        parameters, state = step(parameters, state, train["inputs"][rows], train["labels"][rows])
        if number in SHOWN:
            found.append(float(accuracy(parameters)))
    return found


def main() -> None:
    """Print one row for every normalisation and step size."""
    data = load("mnist-mini")
    train = {name: np.asarray(column) for name, column in data.train.items()}
    test = {name: np.asarray(column)[:TESTED] for name, column in data.test.items()}
    print(f"{'norm':>8}{'step':>8}" + "".join(f"{number:>8}" for number in SHOWN))
    for norm, learning_rate in SETTINGS:
        row = "".join(f"{100 * value:8.1f}" for value in curve(norm, learning_rate, train, test))
        print(f"{norm:>8}{learning_rate:8.3f}{row}", flush=True)


if __name__ == "__main__":
    main()
