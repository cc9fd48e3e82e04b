"""Settings that are numbers."""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.number import check_not_negative, check_positive, check_shares, whole

RULES = {
    check_positive: ([1, 0.5, np.float64(2), np.float32(2)], [0, -1, np.float64(-2), np.int32(0)], "above 0"),
    check_not_negative: ([0, 3.0], [-1, -0.5], "of at least 0"),
    check_shares: ([0, 1, 0.5], [-0.1, 1.5, np.float32(1.5)], "between 0 and 1"),
}
NO_NUMBERS = ["0.5", None, True, [1.0], float("nan"), float("inf")]


@pytest.mark.parametrize("check", RULES)
def test_numbers_lie_where_they_must(check: Any) -> None:
    good, bad, where = RULES[check]
    for value in good:
        check(types.SimpleNamespace(a=value), "a")
    for value in bad + NO_NUMBERS:
        with pytest.raises(ValueError, match=f"a is .*; it must be a number {where}"):
            check(types.SimpleNamespace(b=good[0], a=value), "b", "a")


def test_what_is_known_at_run_time_only_is_not_looked_into() -> None:
    def traced(value: Any) -> Any:
        check_positive(types.SimpleNamespace(a=value), "a")
        return value

    assert jax.jit(traced)(-1.0) == -1.0
    check_positive(types.SimpleNamespace(a=jnp.zeros(3)), "a")


def test_whole_numbers_of_numpy_become_pythons() -> None:
    assert [type(whole(value)) for value in (np.int64(3), 3, 3.0)] == [int, int, float]


SGD = fb.SGD(0.1)
SETTINGS = {
    "penalty of a sketch": (lambda: fb.SketchLasso(3, "0.1"), "penalty is '0.1'"),
    "step size of a sketch": (lambda: fb.SketchLasso(3, 0.1, lower_lr="0.1"), "lower_lr is '0.1'"),
    "penalty of a mask": (lambda: fb.Submodel(penalty="10"), "penalty is '10'"),
    "adjoint's step size": (lambda: fb.GradientDecoder(0.1, 1, 1, adjoint_lr="0.1"), "adjoint_lr is '0.1'"),
    "alpha": (lambda: fb.adjoint.VRHGP(3, alpha="0.9"), "alpha is '0.9'"),
    "mu": (lambda: fb.FedProx(0.1, mu="1"), "mu is '1'"),
    "lambda": (lambda: fb.PFedMe(0.1, lam="15"), "lam is '15'"),
    "threshold": (lambda: fb.ClusteredFL(0.1, "0.4", 1.6), "mean_below is '0.4'"),
    "momentum": (lambda: fb.FetchSGD(SGD, 1, 3, 10, 2, momentum="0.9"), "momentum is '0.9'"),
    "regrown": (lambda: fb.FedDST(SGD, regrown=2.0), r"regrown is 2\.0; it must be a number between 0 and 1"),
    "temperature": (lambda: fb.DSFL(SGD, SGD, np.ones((2, 3)), temperature="1"), "temperature is '1'"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_what_is_no_number_is_refused_before_a_run(case: str) -> None:
    make, message = SETTINGS[case]
    with pytest.raises(ValueError, match=message):
        make()
