"""A cohort: the clients that take part in an exchange, and the verbs that move values.

The verbs check the rules and book the cost here, once for all engines, so that every engine's
ledger is the same by construction; an engine supplies the movements (see `fed/movement.py`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.fed.codec import Codec, Encode, Feedback, RandomCodec, messages
from fedbilevel.fed.ledger import ROUND, Entry, count
from fedbilevel.fed.movement import Movements
from fedbilevel.fed.network import Links, edges
from fedbilevel.fed.place import At, Kept, PlacementError, Published, check_rows
from fedbilevel.fed.program import Program, check_program
from fedbilevel.tree import PyTree, nbytes


class Cohort(Movements):
    """Some clients of a federation, in the order of their ids.

    Attributes:
        ids: `(size,)` ids of its clients.
        size: how many there are (static).
        weights: `(size,)` weights of its clients in a mean; None: uniform.
    """

    ids: Any
    size: int
    weights: Any
    token: str

    @property
    def reached(self) -> int:
        """How many of its clients a message can reach: all, unless some are known to be gone."""
        return self.size

    # ------------------------------------------------------------------ down

    def send(self, tree: PyTree, label: str, *, codec: Codec | None = None) -> At:
        """The same value to every client, or of a `Partial` value its own part. Books a message down each."""
        _check_server_value(tree, "send")
        if codec is None:
            count(Entry("down", label, nbytes(tree)), self.reached)
        else:
            self._book("down", label, nbytes(tree), codec, jnp.ones(self.size, bool))
        self._arriving(nbytes(tree), codec)
        return self._own(self._send(tree), stacked=False, present=self._there())

    def read(self, published: Published) -> tuple[At, Published]:
        """A published value; books a message down only for clients that do not hold it yet."""
        value, holders, newcomers = self._read_published(published)
        count(Entry("down", published.label, nbytes(published.value)), newcomers)
        here = self._own(value, stacked=False, present=self._there())
        return here, Published(published.value, holders, published.label)

    def agreed(self, tree: PyTree) -> At:
        """A value that every client can make by itself, from a seed that all agreed on. Costs nothing."""
        _check_server_value(tree, "agreed")
        return self._own(self._agreed(tree), stacked=False)

    def _agreed(self, tree: PyTree) -> Any:
        return self._send(tree)

    def deal(self, stacked: PyTree, label: str) -> At:
        """Row i of every leaf to client i of the cohort. Books a message down each."""
        _check_server_value(stacked, "deal")
        check_rows(stacked, self.size, "deal")
        count(Entry("down", label, _row_bytes(stacked)), self.reached)
        self._arriving(_row_bytes(stacked))
        return self._own(self._deal(stacked), present=self._there())

    # ----------------------------------------------------------------- there

    def run(self, program: Program, *values: At, key: jax.Array) -> At:
        """Run a local program on every client. Books the oracle calls it makes, and no traffic.

        Client i gets `fold_in(key, i)`, so that every engine draws the same numbers.
        """
        check_program(program)
        for value in values:
            self._check_mine(value)
        _check_key(key)
        return self._run(program, values, key, fails=True)

    def take(self, kept: Kept) -> At:
        """What the clients of this cohort keep. Costs nothing."""
        if not isinstance(kept, Kept):
            raise PlacementError(f"`take` needs a kept value, made by `fed.keep`; got {type(kept).__name__}")
        return self._own(self._take(kept))

    def put(self, kept: Kept, value: At) -> Kept:
        """Keep a new value at the clients of this cohort; the others keep theirs. Costs nothing."""
        self._check_mine(value)
        return self._put(kept, value)

    # -------------------------------------------------------------------- up

    def mean(
        self,
        value: At,
        label: str,
        *,
        weight: Any = None,
        codec: Codec | None = None,
        key: jax.Array | None = None,
    ) -> PyTree:
        """The weighted average over the clients that answer. Books a message up each, one round.

        Args:
            value: what to average.
            label: the name of its line in the ledger.
            weight: `(size,)` weights instead of the federation's own.
            codec: how clients write it for the wire.
            key: what a codec that draws draws from; every client's own is folded in.
        """
        weight = None if weight is None else jnp.asarray(weight)
        if weight is not None and weight.shape != (self.size,):
            seen = jnp.shape(weight)
            raise ValueError(
                f"`mean` needs one weight for each of the {self.size} clients; they have shape {seen}"
            )
        return self._averaged(*self._received(value, label, codec, key), weight)

    def mean_with_feedback(
        self, value: At, memory: Kept, label: str, codec: Codec, *, key: jax.Array | None = None
    ) -> tuple[PyTree, Kept]:
        """The average of what a lossy codec makes of `value + memory`, and the memory of what it left out.

        Books a message up each, one round. A client that does not answer keeps its memory.
        """
        self._check_mine(value)
        own = _key_of(codec, key)
        out = self._run(Feedback(codec), (value, self.take(memory)), own, fails=False)
        rows, answered = self._received(out[0], label, None, None)
        mean = self._averaged(jax.vmap(codec.decode)(rows), answered, None)
        return mean, self.put(memory, self._heard(out[1], answered))

    def _averaged(self, rows: PyTree, answered: jax.Array, weight: Any) -> PyTree:
        given = self.weights if weight is None else weight
        weights = answered if given is None else jnp.asarray(given) * answered
        shares = jnp.asarray(weights, float) / jnp.sum(weights)
        return self._total(shares, jax.tree.map(_as_real, rows))

    def _total(self, shares: jax.Array, rows: PyTree) -> PyTree:
        """`Σ shares_i rows_i`, in the dtypes of the rows."""
        return jax.tree.map(lambda leaf: jnp.tensordot(shares.astype(leaf.dtype), leaf, axes=1), rows)

    def gather(
        self, value: At, label: str, *, codec: Codec | None = None, key: jax.Array | None = None
    ) -> tuple[PyTree, jax.Array]:
        """Every client's value, one by one, and who answered. Books a message up each, one round.

        Returns:
            the stacked values, `(size, ...)`, zeros where nothing came, and `(size,)` bool.
        """
        rows, answered = self._received(value, label, codec, key)
        return self._collected(rows), answered

    def _collected(self, rows: PyTree) -> PyTree:
        """All rows in one place, `(size, ...)`: for engines that hold them in several."""
        return rows

    def _received(
        self, value: At, label: str, codec: Codec | None, key: jax.Array | None
    ) -> tuple[PyTree, jax.Array]:
        self._check_mine(value)
        if codec is not None:
            value = self._run(Encode(codec), (value,), _key_of(codec, key), fails=False)
        rows, able = self._gather(value)
        size = _row_bytes(rows)
        rows, answered = self._awaited(rows, able, size, codec)
        self._book("up", label, size, codec, answered)
        count(ROUND)
        return (rows if codec is None else jax.vmap(codec.decode)(rows)), answered

    def _book(self, direction: str, label: str, whole: int, codec: Codec | None, who: Any) -> None:
        for size, times in messages(codec, whole, self.ids, who):
            count(Entry(direction, label, size), times)

    # -------------------------------------------------------------- sideways

    def push(
        self,
        value: At,
        links: Links,
        label: str,
        *,
        key: jax.Array | None = None,
        time: Any = 0,
        receive: At | None = None,
    ) -> At:
        """Client to client: `out_i = Σ_j W_ij in_j`. Books a message an edge, one round.

        A client that has no value sends nothing: its column of W is as good as zero. One that is away has
        no links in that exchange, and what it would give away stays with it. A random network draws its
        weights from `key`, which must then be a new one in every round.

        Args:
            value: what is sent.
            links: who hears whom.
            label: the name of its line in the ledger.
            key: draws the links.
            time: the number of the exchange, for links that follow a schedule.
            receive: `(n,)` at every client: weights of its own for what it receives, in the place of the
                sender's; absent links stay absent.
        """
        self._check_mine(value)
        weights = self._weights(links, key, time)
        given = None if receive is None else self._own_weights(receive)
        mixed, message, senders = self._push(value, _of_receiver(weights, given))
        used = weights * senders
        self._delivered(used, message)
        count(Entry("edge", label, message), edges(used))
        count(ROUND)
        return self._own(mixed)

    def witnessed(self, links: Links, *, key: jax.Array | None = None, time: Any = 0) -> At:
        """What every client sees of a push: `{"sent": (n,)}`, the weights it gave, `{"heard": (n,)}`, who
        came.

        Costs nothing: a sender knows what it sends, a receiver from whom it got something.
        """
        weights = self._weights(links, key, time)
        heard = (weights != 0).astype(weights.dtype)
        return self._own(self._deal({"sent": weights.T, "heard": heard}))

    def relative_weights(self, *, alike: bool = False) -> At:
        """At every client its weight over the mean weight: 1 where all weigh the same, or shall (`alike`).

        A plain mean of what is multiplied by it is the weighted mean, which is how clients count by their
        weights where nobody collects what they send. Costs nothing: it is a setting.
        """
        ones = jnp.ones(self.size)
        weights = ones if alike or self.weights is None else jnp.asarray(self.weights, ones.dtype)
        return self._own(self._deal(weights / jnp.mean(weights)))

    def _weights(self, links: Links, key: jax.Array | None, time: Any) -> jax.Array:
        drawn = jax.random.key(0) if key is None else key
        return links.weights(drawn, self.size, time, self._there())

    def _own_weights(self, receive: At) -> jax.Array:
        self._check_mine(receive)
        rows: jax.Array = self._collected(self._gather(receive)[0])
        return rows

    # ----------------------------------------------------------------- rules

    def _own(self, value: Any, *, stacked: bool = True, present: Any = None) -> At:
        return At(value, present, self.token, stacked)

    def _check_mine(self, value: Any) -> None:
        if isinstance(value, Kept):
            raise PlacementError("a kept value is read with `cohort.take(kept)` before it is used")
        if not isinstance(value, At):
            raise PlacementError(
                f"a client can use only what it has: got a server value ({type(value).__name__}). "
                "Send it first: `cohort.send(value, label)`."
            )
        if value.cohort != self.token:
            raise PlacementError(
                f"a value of cohort {value.cohort} was used in cohort {self.token}: its clients are "
                "others, which do not have it. Send it to this cohort too, publish it "
                "(`fed.publish`, `cohort.read`), or keep it at the clients (`fed.keep`)."
            )


def _as_real(rows: Any) -> jax.Array:
    """The mean of whole numbers is a real one."""
    return rows if jnp.issubdtype(rows.dtype, jnp.inexact) else rows.astype(float)


def _check_key(key: Any) -> None:
    if not (hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()):
        seen = f"{key.dtype}{list(key.shape)}" if hasattr(key, "dtype") else repr(key)
        raise TypeError(f"`run` needs one random key, of `jax.random.key` or split from one; got {seen}")


def _key_of(codec: Codec, key: jax.Array | None) -> jax.Array:
    """The key that clients write with: any will do for a codec that draws nothing."""
    if key is None and isinstance(codec, RandomCodec):
        raise ValueError(
            f"{type(codec).__name__} draws what it writes: give a key, a new one in every round, such as "
            "`cohort.mean(value, label, codec=codec, key=key)`"
        )
    return jax.random.key(0) if key is None else key


def _of_receiver(weights: jax.Array, given: jax.Array | None) -> jax.Array:
    return weights if given is None else jnp.where(weights != 0, given, 0).astype(weights.dtype)


def _row_bytes(stacked: PyTree) -> int:
    leaves = jax.tree.leaves(stacked)
    return sum(int(np.prod(jnp.shape(leaf)[1:])) * jnp.result_type(leaf).itemsize for leaf in leaves)


def _check_server_value(tree: PyTree, verb: str) -> None:
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, At | Kept | Published))
    if any(isinstance(leaf, At | Kept | Published) for leaf in leaves):
        raise PlacementError(
            f"`{verb}` takes server values; this one lives on clients already. "
            "Use it in `run`, or bring it to the server with `mean` first."
        )
