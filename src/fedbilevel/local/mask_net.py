"""A small network that makes soft masks: what FedSep's clients learn their sub-models by."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from fedbilevel.number import whole
from fedbilevel.tree import PyTree


class MaskNet(eqx.Module):
    """`a = HN(φ)`: soft masks of all kernels, made by a small network.

        h_l = tanh(e_l · W + b) ,   a_l = sigmoid(h_l · O_l + c_l)

    with an embedding e_l of every name l of kernels; all of these are φ. c starts at 3, so that a starts near
    one, the whole model.

    Args:
        sizes: how many kernels of each name there are.
        hidden: length of e and h.

    Reference: S. Gao, F. Huang, W. Cai, H. Huang, Network pruning via performance maximization, CVPR 2021,
    which FedSep follows; the shape of the network is ours.
    """

    sizes: tuple[int, ...] = eqx.field(static=True)
    hidden: int = eqx.field(static=True, converter=whole)

    def init(self, key: jax.Array, dtype: Any) -> PyTree:
        """φ at the start."""
        k_names, k_weight, k_out = jr.split(key, 3)
        size = self.hidden**-0.5
        keys = jr.split(k_out, len(self.sizes))
        return {
            "names": jr.normal(k_names, (len(self.sizes), self.hidden), dtype),
            "weight": size * jr.normal(k_weight, (self.hidden, self.hidden), dtype),
            "bias": jnp.zeros(self.hidden, dtype),
            "out": [
                size * jr.normal(k, (self.hidden, n), dtype) for k, n in zip(keys, self.sizes, strict=True)
            ],
            "centre": [jnp.full(n, 3, dtype) for n in self.sizes],
        }

    def __call__(self, phi: PyTree) -> list[jax.Array]:
        hidden = jnp.tanh(phi["names"] @ phi["weight"] + phi["bias"])
        pairs = zip(hidden, phi["out"], phi["centre"], strict=True)
        return [jax.nn.sigmoid(row @ out + centre) for row, out, centre in pairs]
