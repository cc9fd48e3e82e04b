"""Placed values: what lives on the clients and what they keep."""

from __future__ import annotations

from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp

from fedbilevel.tree import PyTree


class PlacementError(TypeError):
    """A value was used in a place where it does not live."""


class At:
    """A value on every client of one cohort. Opaque: read it with `mean`, use it in `run`.

    Tree functions, and so all of JAX, refuse it likewise; only `fed.loop` can carry it.

    Attributes:
        value: how the engine holds it (stacked arrays, or a handle of what the clients hold).
        present: which clients of the cohort really have it, `(size,)` bool; None: all of them.
        cohort: the token of the cohort it belongs to.
        stacked: whether `value` has one row a client (False: the same value for all of them).
    """

    def __init__(self, value: Any, present: Any = None, cohort: str = "", stacked: bool = True) -> None:
        self.value, self.present, self.cohort, self.stacked = value, present, cohort, stacked

    def __getitem__(self, part: Any) -> At:
        """A part of the value (an item of a tuple, a key of a dict); costs nothing."""
        return At(self.value[part], self.present, self.cohort, self.stacked)

    def __repr__(self) -> str:
        return f"<a value on the clients of {self.cohort}>"

    def __iter__(self) -> NoReturn:
        raise PlacementError(
            "a client value cannot be unpacked, since its length is not known here; "
            "take its parts as value[0], value[1], ..."
        )

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise PlacementError(
            "this value lives on the clients of a cohort, so the server cannot compute with it. "
            "Use it in a local program with `cohort.run(program, value, key=...)`, or bring it to "
            "the server with `cohort.mean(value, label)`, which costs a round."
        )

    __hash__ = object.__hash__
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = __rpow__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = _refuse
    __neg__ = __pos__ = __abs__ = __float__ = __int__ = __bool__ = __len__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __array__ = _refuse


# Registered as a node that cannot be opened: whoever flattens it gets the error that explains.
jax.tree_util.register_pytree_node(At, At._refuse, lambda _, parts: At(parts))


def is_at(leaf: Any) -> bool:
    """Whether a leaf is a client value (for `is_leaf=` of tree functions)."""
    return isinstance(leaf, At)


class Kept(eqx.Module):
    """A value that every client of the federation keeps between rounds: part of the state.

    Make one with `fed.keep(stacked)`; read and write it with a cohort's `take` and `put`.
    """

    value: Any


class Published(eqx.Module):
    """A server value that each client downloads at most once: `cohort.read` bills newcomers only.

    Attributes:
        value: the server's value.
        holders: which clients hold it already (in the form that suits the engine).
    """

    value: PyTree
    holders: Any
    label: str = eqx.field(static=True)


def check_rows(stacked: PyTree, clients: int, verb: str) -> None:
    """Raise an error that explains unless every leaf has one row a client."""
    for leaf in jax.tree.leaves(stacked):
        if jnp.ndim(leaf) == 0 or jnp.shape(leaf)[0] != clients:
            raise ValueError(
                f"`{verb}` needs one row for each of the {clients} clients; "
                f"a leaf has shape {jnp.shape(leaf)}"
            )


def map_kept(function: Any, state: PyTree) -> PyTree:
    """Apply `function` to every kept value of a state and leave the rest alone."""
    return jax.tree.map(
        lambda leaf: function(leaf) if isinstance(leaf, Kept) else leaf,
        state,
        is_leaf=lambda leaf: isinstance(leaf, Kept),
    )
