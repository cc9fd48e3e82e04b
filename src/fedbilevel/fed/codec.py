"""Codecs: how a value is written for the wire. The ledger bills what `encode` returns."""

from __future__ import annotations

import abc
from typing import Any

import equinox as eqx

from fedbilevel.fed.program import Program
from fedbilevel.tree import PyTree


class Codec(eqx.Module):
    """A pair of pure functions: `decode(encode(value))` approximates `value`."""

    @abc.abstractmethod
    def encode(self, value: PyTree) -> PyTree:
        """The message for a value: a pytree of arrays whose bytes are billed."""

    @abc.abstractmethod
    def decode(self, message: PyTree) -> PyTree:
        """The value that the receiver makes of a message."""


class Dense(Codec):
    """The value itself, every scalar in its own dtype."""

    def encode(self, value: PyTree) -> PyTree:
        return value

    def decode(self, message: PyTree) -> PyTree:
        return message


class Encode(Program):
    """The local program that writes a client's value with a codec."""

    codec: Codec

    def __call__(self, me: Any, *values: Any) -> PyTree:
        return self.codec.encode(values[0])
