"""What methods ask of a network: an error that explains if it cannot give it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from fedbilevel.fed.mixing import Matrix, connected, metropolis
from fedbilevel.fed.network import Links, Network


def check_links(links: Any) -> None:
    """Raise an error that explains unless these are links."""
    if not isinstance(links, Links):
        raise TypeError(
            f"links is {links!r}; it must say who hears whom, such as fedbilevel.links.Complete() or "
            "fedbilevel.links.Given(matrix)"
        )


def check_all_answer(fed: Any) -> None:
    """Raise an error that explains if clients of a federation may fall silent, where they mix what they hold.

    A sender's weights, its own among them, keep the sum of all values; who computes nothing sends nothing,
    not even to itself.
    """
    dropout = getattr(fed, "dropout", 0.0)
    if dropout > 0:
        raise ValueError(
            f"dropout is {dropout}, but where clients mix with their neighbours, what a silent client held "
            "is lost for all. Leave dropout at 0; for links that come and go use links.Stochastic, for "
            "clients that do Simulator(availability=...)"
        )


def check_nobody_away(fed: Any) -> None:
    """Raise an error that explains if clients of a federation may be away, where weights must be fixed."""
    if getattr(getattr(fed, "conditions", None), "availability", None) is not None:
        raise ValueError(
            "exact diffusion needs the same weights in every exchange, but clients come and go here, and "
            'their links with them. Leave availability out, or take correction="tracking"'
        )


def check_push_sum(network: Network) -> None:
    """Raise an error that explains unless push-sum over these links reaches a consensus."""
    totals = np.asarray(network.base).sum(axis=1)
    if not bool(network.balanced) and not np.allclose(totals, 1, atol=1e-5):
        sender = int(np.argmax(np.abs(totals - 1).max(axis=0)))
        raise ValueError(
            f"client {sender} gives away weights that sum to {totals[:, sender].tolist()}; in push-sum every "
            "sender's weights, a column of the matrix, must sum to one, or mass is lost"
        )
    if np.any(np.asarray(network.base) < 0):
        raise ValueError("push-sum needs weights of at least 0; a weight is negative")
    _check_something_stays(network)
    _check_connected(network)


def _check_connected(network: Network) -> None:
    """Raise an error that explains unless everybody hears, perhaps by others, from everybody."""
    if not connected(network.heard() > 0):
        raise ValueError(
            "some client never hears, even by others, from some other one: no consensus is possible"
        )


def _check_something_stays(network: Network) -> None:
    """Raise an error that explains if a client may have nobody to give its mass to, not even itself."""
    base, probability = np.asarray(network.base), np.asarray(network.probability)
    itself = np.diagonal(base, axis1=1, axis2=2)
    safe = (itself > 0) | np.all((probability >= 1) | (base == 0), axis=1) | bool(network.balanced)
    if not np.all(safe):
        raise ValueError(
            f"client {int(np.argwhere(~safe)[0, 1])} gives itself no weight, and its links may all be "
            "absent: its mass would be lost. Give every client whose links come and go a weight for itself"
        )


_NEEDED = "weights must be doubly stochastic, so that in every exchange rows and columns sum to one;"
_INSTEAD = (
    "Take links.Complete, Ring, ErdosRenyi or Stochastic(directed=False, balanced=True); for directed links "
    "there are the push-sum methods SGP and PDBO"
)


def check_doubly_stochastic(network: Network) -> None:
    """Raise an error that explains unless in every exchange rows and columns of the weights sum to one.

    What nodes hold goes to its mean then, without push-sum's w to divide by.
    """
    if not (_always_there(network) or _drawn_in_pairs(network)):
        raise ValueError(
            f"{_NEEDED} these links come and go, and a sender shares out what absent ones leave, so that "
            f"rows do not. {_INSTEAD}"
        )
    weights = _weights_when_all_are_there(network)
    sums = np.stack([weights.sum(axis=1), weights.sum(axis=2)])
    if not np.allclose(sums, 1, atol=1e-5):
        raise ValueError(f"{_NEEDED} those of these sum to {sums.min():.3g}..{sums.max():.3g}. {_INSTEAD}")
    if np.any(weights < 0):
        raise ValueError(f"weights must be at least 0; the smallest is {weights.min():.3g}. {_INSTEAD}")
    _check_connected(network)


def check_fixed_symmetric(network: Network) -> None:
    """Raise an error that explains unless all exchanges have the same symmetric weights."""
    weights = _weights_when_all_are_there(network)
    fine = {
        "these links come and go": _always_there(network),
        f"these are {len(weights)} matrices in turn": np.allclose(weights, weights[0], atol=1e-5),
        "these are not symmetric": np.allclose(weights, weights.transpose(0, 2, 1), atol=1e-5),
    }
    wrong = [what for what, holds in fine.items() if not holds]
    if wrong:
        raise ValueError(
            f"exact diffusion needs fixed, symmetric weights; {wrong[0]}. Take links.Complete, Ring or "
            'ErdosRenyi, or correction="tracking"'
        )


def _always_there(network: Network) -> bool:
    """Whether no link is ever absent."""
    base, probability = np.asarray(network.base), np.asarray(network.probability)
    return bool(np.all((probability >= 1) | (base == 0) | np.eye(base.shape[-1], dtype=bool)))


def _drawn_in_pairs(network: Network) -> bool:
    """Whether weights are Metropolis' on links that come and go both ways at once."""
    chances = np.asarray(network.probability) * (np.asarray(network.base) != 0)
    paired = np.array_equal(chances, chances.transpose(0, 2, 1))
    return paired and bool(network.balanced) and bool(network.undirected)


def _weights_when_all_are_there(network: Network) -> Matrix:
    """`(times, n, n)`."""
    if not bool(network.balanced):
        return np.asarray(network.base)
    return np.stack([np.asarray(metropolis(jnp.asarray(base != 0))) for base in np.asarray(network.base)])


def check_both_ways(network: Network) -> None:
    """Raise an error that explains unless whoever can hear a client can also be heard by it.

    Hypergradient push receives over j → i what the exact recursion needs over i → j.
    """
    heard = network.heard() > 0
    one_way = np.argwhere(heard & ~heard.T)
    if len(one_way):
        i, j = one_way[0].tolist()
        raise ValueError(
            f"client {i} hears client {j}, but {j} never hears {i} ({len(one_way)} such links). "
            f"Hypergradient push "
            "needs links that exist both ways, if not at the same time (assumption 6 of its paper)"
        )


def check_undirected(network: Network) -> None:
    """Raise an error that explains unless in every exchange links come in pairs."""
    support = (np.asarray(network.base) != 0) & (np.asarray(network.probability) > 0)
    certain = np.all((np.asarray(network.probability) >= 1) | ~support)
    if not np.array_equal(support, support.transpose(0, 2, 1)) or not (certain or bool(network.undirected)):
        raise ValueError(
            "exact backpropagation answers over the link that brought a message, so links must be "
            "undirected; "
            "over directed links use hypergradient push (HGP, VRHGP)"
        )
