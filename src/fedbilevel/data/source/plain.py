"""The content of a pickle, if that is plain data: a reader that cannot run code.

CIFAR's "python version" is distributed as pickles. Python's own unpickler calls whatever a file names, so
a file from a stranger may do anything. This one only takes the file apart (`pickletools.genops` decodes, and
never executes) and knows how to make containers, numbers, strings, bytes and arrays of numbers. Whatever else
a file asks for is refused.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt


class PlainError(ValueError):
    """A pickle holds something other than plain data, or is damaged."""


class _Name(str):
    """A global that the file names. It stands for nothing; a few are understood when they are called."""


class _Unfilled:
    """An array of which only the existence is known yet: its values follow."""


class _Mark:
    """Where a group of values begins on the stack."""


_VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINSTRING", "SHORT_BINSTRING", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "MARK": _Mark,
}
_SMALL_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_NEW_ARRAY = {"numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"}


def read_plain(raw: bytes) -> Any:
    """The value in a pickle of protocol 1 to 4; Python 2's strings become text, byte by byte.

    >>> read_plain(bytes([0x80, 2]) + b"]K\\x07a.")
    [7]
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(raw):
            machine.do(opcode.name, argument)
        (value,) = machine.stack
    except PlainError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise PlainError(f"it is no complete pickle ({error})") from None
    return value


class _Machine:
    """The stack and the memory that the instructions of a pickle work on."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memory: dict[int, Any] = {}

    def do(self, instruction: str, argument: Any) -> None:
        """Follow one instruction, or refuse."""
        if instruction in _VALUES:
            self.stack.append(argument)
        elif instruction in _CONSTANTS:
            self.stack.append(_CONSTANTS[instruction]())
        elif instruction in _SMALL_TUPLES:
            self.stack.append(tuple(reversed([self.stack.pop() for _ in range(_SMALL_TUPLES[instruction])])))
        elif instruction in _STEPS:
            _STEPS[instruction](self, argument)
        elif instruction not in ("PROTO", "FRAME", "STOP"):
            raise PlainError(f"it uses the instruction {instruction}, which plain data do not need")

    def group(self) -> list[Any]:
        """Take the values above the last mark."""
        values: list[Any] = []
        while not isinstance(value := self.stack.pop(), _Mark):
            values.append(value)
        return values[::-1]

    def tuple(self, _: Any) -> None:
        self.stack.append(tuple(self.group()))

    def append(self, _: Any) -> None:
        value = self.stack.pop()
        self.stack[-1].append(value)

    def appends(self, _: Any) -> None:
        values = self.group()
        self.stack[-1].extend(values)

    def set_item(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1][key] = value

    def set_items(self, _: Any) -> None:
        pairs = self.group()
        self.stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))

    def keep(self, place: Any) -> None:
        self.memory[len(self.memory) if place is None else place] = self.stack[-1]

    def recall(self, place: Any) -> None:
        self.stack.append(self.memory[place])

    def name(self, both: Any) -> None:
        """A global: pickletools gives module and name with a blank between them."""
        self.stack.append(_Name(both.replace(" ", ".")))

    def name_from_stack(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(_Name(f"{module}.{name}"))

    def call(self, _: Any) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.stack.append(_called(function, arguments))

    def fill(self, _: Any) -> None:
        """Give an array its values, or a type its byte order, also where it was kept in memory."""
        state, target = self.stack.pop(), self.stack.pop()
        filled = _filled(target, state)
        self.stack.append(filled)
        self.memory = {place: filled if kept is target else kept for place, kept in self.memory.items()}


_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "TUPLE": _Machine.tuple,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.keep),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.recall),
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.name_from_stack,
    "REDUCE": _Machine.call,
    "BUILD": _Machine.fill,
}


def _called(function: Any, arguments: Any) -> Any:
    """The result of the few calls that stand for plain data."""
    known = function if isinstance(function, _Name) else None
    if known in _NEW_ARRAY and arguments[0] == "numpy.ndarray":
        return _Unfilled()
    if known == "numpy.dtype" and re.fullmatch(r"[iuf][1248]", arguments[0]):
        return np.dtype(arguments[0])
    # The next two are how Python 3 writes bytes in protocol 2.
    if known == "_codecs.encode" and arguments[1] == "latin1":
        return arguments[0].encode("latin1")
    if known == "__builtin__.bytes" and arguments == ():
        return b""
    raise PlainError(f"it asks to call {function!s:.80}, which plain data do not need")


def _filled(target: Any, state: Any) -> npt.NDArray[Any] | np.dtype[Any]:
    if isinstance(target, np.dtype):
        return target.newbyteorder(state[1])
    if not isinstance(target, _Unfilled):
        raise PlainError(f"it asks to change a {type(target).__name__}, which plain data do not need")
    _, shape, dtype, by_columns, raw = state
    values = np.frombuffer(raw.encode("latin1") if isinstance(raw, str) else raw, dtype)
    return values.reshape(shape, order="F" if by_columns else "C")
