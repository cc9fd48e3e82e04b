"""The factor and the bounds of PDBO's theorems, against simulations of VR-HGP's recursion."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fedbilevel import theory

HGP, GOOD = (1.0, 0.0), (0.9, 0.1)
PAIRS = [HGP, (1.0, 0.5), GOOD, (0.5, 0.5), (0.1, 0.9), (0.0, 1.0), (0.0, 0.3), (0.7, 1.0)]
SCRIPT = pathlib.Path(__file__).parent.parent / "papers" / "pdbo" / "figure1.py"

Draw = Callable[[], Any]
"""A new random operator, for every repetition its own: (repetitions, rows, columns)."""


def vr_hgp(pair: tuple[float, float], draw_a: Draw, draw_b: Draw, c: Any, rounds: int) -> Any:
    """v after some rounds of all repetitions: the recursion as it is written."""
    alpha, beta = pair
    u = w = c[None, :, None]
    v = np.zeros(())
    for _ in range(rounds):
        b, a = draw_b(), draw_a()
        v = alpha * (v + b @ u) + (1 - alpha) * (b @ w)
        u = a @ u
        w = beta * (a @ w + c[None, :, None]) + (1 - beta) * (w + u)
    return v[..., 0]


def rms(errors: Any) -> float:
    return float(np.sqrt(np.mean(np.sum(errors**2, axis=-1))))


# ------------------------------------------------------------------ the factor


def small_noise(pair: tuple[float, float], eta: float, rounds: int) -> float:
    """RMS error of VR-HGP with numbers `η(1 ± s)` and `1 ± s`, in units of `s/(1 − η)`."""
    random, noise = np.random.default_rng(0), 0.02

    def around(mean: float) -> Draw:
        return lambda: mean * (1 + noise * (2 * random.integers(0, 2, (8000, 1, 1)) - 1))

    v = vr_hgp(pair, around(eta), around(1.0), np.ones(1), rounds)
    return rms(v - 1 / (1 - eta)) * (1 - eta) / noise


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("eta", [0.3, 0.8])
def test_the_factor_is_the_error_where_noise_is_small(pair: tuple[float, float], eta: float) -> None:
    # 8,000 repetitions: one standard error of the RMS is 0.8 %.
    assert small_noise(pair, eta, 200) == pytest.approx(
        theory.vr_hgp_factor(*pair, eta) / np.sqrt(8), rel=0.02
    )


def test_without_fresh_starts_the_limit_of_the_formula_is_no_bound() -> None:
    limit = theory.vr_hgp_factor(0.9, 1e-12, 0.8) / np.sqrt(8)
    assert limit == pytest.approx(np.sqrt(0.1 / 1.9))
    assert min(small_noise((0.9, 0.0), 0.8, rounds) for rounds in (100, 200)) > 5 * limit
    assert theory.vr_hgp_factor(0.9, 0.0, 0.8) == np.inf


def test_hgp_stalls_and_vr_hgp_goes_on() -> None:
    hgp, reduced = ([small_noise(pair, 0.8, rounds) for rounds in (30, 200)] for pair in (HGP, GOOD))
    assert hgp[1] == pytest.approx(hgp[0], rel=0.02)
    assert reduced[1] < hgp[1] / 3


def test_on_a_grid_the_best_has_large_alpha_and_small_beta() -> None:
    grid = np.arange(1, 10) / 10
    alpha, beta, eta = np.meshgrid(grid, grid, [0.01, 0.3, 0.6, 0.9, 0.99], indexing="ij")
    factors = theory.vr_hgp_factor(alpha, beta, eta)
    for k, value in enumerate(eta[0, 0]):
        i, j = np.unravel_index(factors[..., k].argmin(), (9, 9))
        assert (grid[i], grid[j]) == GOOD
        assert factors[i, j, k] < theory.vr_hgp_factor(*HGP, value) / 3, "a few times smaller, says the paper"
    assert theory.vr_hgp_factor(0.1, 0.9, 0.5) > theory.vr_hgp_factor(*HGP, 0.5), "a bad choice is worse"


def test_at_the_edges() -> None:
    hgp = np.sqrt(8 * (0.5**2 + 0.5**2) / (1 - 0.5**2))
    np.testing.assert_allclose(theory.vr_hgp_factor(1, [0, 0.2, 1], 0.5), hgp)
    assert np.all(theory.vr_hgp_factor([1, 1, 0.5, 0.5, 0], [0, 0.5, 0.5, 0, 1], 1) == np.inf)
    np.testing.assert_allclose(theory.vr_hgp_factor([0, 0.5], 1, 0), np.sqrt([8, 8 / 3]))
    assert theory.vr_hgp_factor(np.ones((3, 1)), 0.1, np.zeros(4)).shape == (3, 4)
    assert isinstance(theory.vr_hgp_factor(0.9, 0.1, 0.5), float)


@pytest.mark.parametrize("wrong", [(1.1, 0, 0), (0, -0.1, 0), (0, 0, [0.5, 2]), (np.nan, 0, 0)])
def test_outside_the_unit_interval_there_is_no_factor(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"(alpha|beta|eta) is .*must lie in \[0, 1\]"):
        theory.vr_hgp_factor(*wrong)


# ------------------------------------------------------------------ theorem 1

LONE = {"weights": [[1.0]], "frequencies": [[1.0]], "batch_size": 1}
SIZES = {"eta_a": 0.8, "eta_b": 2.0, "c_norm": 1.0, "d_y": 4, "d_lambda": 2, "epsilon": 0.05}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("eta_a", [0.0, 0.5, 0.9])
def test_after_many_rounds_the_sums_of_the_proof_are_the_closed_form(
    pair: tuple[float, float], eta_a: float
) -> None:
    known: Any = {**LONE, **SIZES, "eta_a": eta_a}
    limit = theory.hgp_error_bound(*pair, **known)
    assert theory.hgp_error_bound(*pair, rounds=2000, **known) == pytest.approx(limit, rel=1e-9)
    assert theory.hgp_error_bound(*pair, rounds=3, **known) != pytest.approx(limit, rel=1e-3) or eta_a == 0


def contractions(random: Any, rows: int, norm: float) -> Draw:
    """One of eight matrices, whose norms are at most `norm`; also their mean, as an attribute."""
    matrices = np.eye(rows, 4) + 0.5 * random.standard_normal((8, rows, 4))
    matrices *= norm / np.linalg.norm(matrices, 2, (1, 2))[:, None, None]

    def draw() -> Any:
        return matrices[random.integers(0, 8, 1000)]

    draw.mean = matrices.mean(0)  # type: ignore[attr-defined]
    return draw


@pytest.mark.parametrize("rounds", [5, 100])
@pytest.mark.parametrize("pair", [*PAIRS, (0.9, 0.0)])
def test_one_node_with_minibatches_stays_below_the_bound(pair: tuple[float, float], rounds: int) -> None:
    """With one node κ = 1, and assumption 8 is that the norms are at most η_A and η_B."""
    random = np.random.default_rng(1)
    draw_a, draw_b = (contractions(random, rows, norm) for rows, norm in ((4, 0.8), (2, 2.0)))
    c = np.array([1.0, -1.0, 1.0, 1.0]) / 2
    exact = draw_b.mean @ np.linalg.solve(np.eye(4) - draw_a.mean, c)  # type: ignore[attr-defined]
    errors = vr_hgp(pair, draw_a, draw_b, c, rounds) - exact
    known: Any = {**LONE, **SIZES, "rounds": rounds}
    assert np.quantile(np.linalg.norm(errors, axis=1), 0.95) < theory.hgp_error_bound(*pair, **known)
    # The differences are a martingale, so that the RMS is below the same sum without Azuma's 8 log(6/ε).
    rest = 2.0 * 0.8**rounds / 0.2
    deviation = (theory.hgp_error_bound(*pair, **known) - rest) / np.sqrt(8 * np.log(6 / 0.05))
    assert rms(errors) < deviation + rest


def network(random: Any) -> tuple[dict[str, Any], Draw, Draw, Any]:
    """Three nodes with random directed edges that fulfil assumption 8: constants, draws, and `B̄(I − Ā)⁻¹`."""
    weights, frequencies = random.dirichlet(np.ones(3), 3), random.uniform(0.4, 0.8, (3, 3))
    np.fill_diagonal(frequencies, 1)
    ratios = weights / frequencies.T

    def signed(rows: int, norm: float) -> Any:  # derivatives of φ and ψ of every node, as large as allowed
        maps = random.standard_normal((2, 3, rows, 2))
        return maps * (norm / (2 * ratios.sum()) / np.linalg.norm(maps, 2, (2, 3)))[..., None, None]

    def assemble(maps: Any, mixing: Any) -> Any:  # block (i, j) is mixing_ij φ_i' + 1_ij ψ_i'
        blocks = (
            mixing[..., None, :, None] * maps[0][:, :, None]
            + np.eye(3)[:, None, :, None] * maps[1][:, :, None]
        )
        return blocks.reshape(*mixing.shape[:-2], -1, 6)

    def draws(maps: Any) -> Draw:
        return lambda: assemble(maps, ratios * (random.random((500, 3, 3)) < frequencies.T))

    a, b = signed(2, 0.9), signed(1, 1.0)
    solved = assemble(b, weights) @ np.linalg.inv(np.eye(6) - assemble(a, weights))
    return {"weights": weights, "frequencies": frequencies}, draws(a), draws(b), solved


@pytest.mark.parametrize("seed", range(3))
def test_a_random_directed_network_stays_below_the_bound(seed: int) -> None:
    random = np.random.default_rng(seed)
    constants, draw_a, draw_b, solved = network(random)
    c = random.standard_normal(6)
    known: Any = {**SIZES, "eta_a": 0.9, "eta_b": 1.0, "c_norm": np.linalg.norm(c), "d_y": 2, "d_lambda": 1}
    found = {}
    for pair in (HGP, GOOD, (0.1, 0.9)):
        errors = np.linalg.norm(vr_hgp(pair, draw_a, draw_b, c, 100) - solved @ c, axis=1)
        bound = theory.hgp_error_bound(*pair, batch_size=np.inf, rounds=100, **constants, **known)
        assert np.quantile(errors, 0.95) < bound
        found[pair] = rms(errors[:, None])
    assert found[GOOD] < found[HGP] / 2


def test_a_wrong_recursion_breaks_the_bound() -> None:
    """Algorithm 5 prints u for w in its line 22: then v forgets everything."""
    alpha, rounds = 0.99, 3000
    v, u = 0.0, 1.0
    for _ in range(rounds):
        v, u = alpha * (v + u) + (1 - alpha) * u, 0.3 * u
    known: Any = {**LONE, "batch_size": np.inf, "d_y": 1, "d_lambda": 1, "epsilon": 0.05, "c_norm": 1.0}
    bound = theory.hgp_error_bound(alpha, 0.01, eta_a=0.3, eta_b=1.0, rounds=rounds, **known)
    assert abs(v - 1 / 0.7) > bound


def test_the_bound_of_hgp_on_a_pair_of_nodes_by_hand() -> None:
    """κ = 0.5 + 0.5 + 1 + 1 = 3, Σ(p̄/δ̄)² = 2.5, τ = 3·2/(3·0.5) = 4, log(2·5/0.1) = log 100."""
    pair: Any = {"weights": np.full((2, 2), 0.5), "frequencies": [[1.0, 0.5], [0.5, 1.0]], "batch_size": 4}
    bound = theory.hgp_error_bound(
        *HGP, eta_a=0.5, eta_b=3.0, c_norm=2.0, d_y=4, d_lambda=1, epsilon=0.1, **pair
    )
    assert bound == pytest.approx(np.sqrt(16 / 3) * 4 * np.sqrt((2.5 + 2) * np.log(100)))


@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0])
def test_the_first_two_rounds_by_hand(alpha: float) -> None:
    """`v² = αB̂⁰c + B̂²(Â¹c + (1−α)c)` for every β: the noise of B̂⁰, B̂², Â¹ counts α, η + 1 − α, η times."""
    eta, known = 0.6, {**LONE, **SIZES, "eta_a": 0.6}
    spread = 2.0 * np.sqrt(5 * np.log(6 / 0.05))
    for rounds, gains in ((1, [1.0]), (2, [alpha, eta + 1 - alpha, eta])):
        bound = theory.hgp_error_bound(alpha, [0.0, 0.4, 1.0], rounds=rounds, **known)
        rest = 2.0 * eta**rounds / (1 - eta)
        np.testing.assert_allclose(bound, np.sqrt(8) * np.linalg.norm(gains) * spread + rest)


RING = np.roll(np.eye(3), 1, axis=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eta_a": 1.0}, "eta_a is 1.0.*contraction"),
        ({"epsilon": 0.0}, "epsilon is 0.0.*probability"),
        ({"rounds": 0}, "rounds is 0.*at least one"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"eta_b": -1.0}, "eta_b is -1.0.*not negative"),
        ({"weights": [[0.5]]}, "rows of weights sum to"),
        ({"weights": [0.5, 0.5]}, r"must be \(n, n\)"),
        (
            {"weights": (RING + np.eye(3)) / 2, "frequencies": RING + np.eye(3)},
            "node 0 sends to 1 but never hears",
        ),
    ],
)
def test_what_has_no_bound_is_refused(change: dict[str, Any], message: str) -> None:
    known: Any = {**LONE, **SIZES, **change}
    with pytest.raises(ValueError, match=message):
        theory.hgp_error_bound(*GOOD, **known)


# ------------------------------------------------------------------ theorem 11


def fixed(matrix: Any) -> Draw:
    return lambda: np.asarray(matrix)[None]


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_printed_theorem_11_is_too_small_and_ours_is_not(nodes: int) -> None:
    """Node 0's contraction is 0.89 at the fixed point, 0.9 where it stands; of two, half by φ, half by ψ."""
    there, here = np.diag([0.89, 0.0][:nodes]), np.diag([0.9, 0.0][:nodes])
    b, c = fixed(np.eye(nodes)), np.eye(nodes)[0]
    moved = np.abs(vr_hgp(GOOD, fixed(here), b, c, 2000) - vr_hgp(GOOD, fixed(there), b, c, 2000)).max()
    assert moved == pytest.approx(1 / 0.1 - 1 / 0.11)
    distances = np.eye(nodes)[0] * 0.01 / nodes
    printed = 1 / (1 - 0.9) * nodes * distances.sum()
    ours = theory.stationary_bias_bound(
        eta_a=0.9, eta_b=1.0, c_norm=1.0, l_y=1.0, l_lambda=0.0, distances=distances
    )
    assert printed == pytest.approx(0.1)
    assert printed < moved < ours


def test_both_maps_of_a_lone_node_move() -> None:
    """φ and ψ each by 0.01, from A = 0.08 to 0.1: the bound with `G = n Σ` would be half of it."""
    known: Any = {"eta_a": 0.1, "eta_b": 1.0, "c_norm": 1.0, "l_y": 1.0, "l_lambda": 0.0}
    bound = theory.stationary_bias_bound(distances=0.01, **known)
    assert bound / 2 < 1 / 0.9 - 1 / 0.92 < bound


@pytest.mark.parametrize("seed", range(20))
def test_the_bias_of_random_operators_is_below_the_bound(seed: int) -> None:
    """One node whose φ and ψ move in one direction, as far as their Lipschitz constants allow."""
    random = np.random.default_rng(seed)
    draw_a, draw_b = (contractions(random, rows, norm) for rows, norm in ((4, 0.6), (2, 1.5)))
    (a, b), (da, db) = ((draw_a()[0], draw_b()[0]) for _ in range(2))
    distance, l_y, l_lambda, c = 0.1, 0.7, 0.5, random.standard_normal(4)
    moved_a, moved_b = a + 2 * l_y * distance / 0.6 * da, b + 2 * 1.5 * l_lambda * distance / 1.5 * db
    exact = b @ np.linalg.solve(np.eye(4) - a, c)
    error = np.linalg.norm(moved_b @ np.linalg.solve(np.eye(4) - moved_a, c) - exact)
    bound = theory.stationary_bias_bound(
        eta_a=max(np.linalg.norm(moved_a, 2), 0.6),
        eta_b=1.5,
        c_norm=float(np.linalg.norm(c)),
        l_y=l_y,
        l_lambda=l_lambda,
        distances=distance,
    )
    assert error < bound


def test_at_the_fixed_point_there_is_no_bias() -> None:
    known: Any = {"eta_a": 0.5, "eta_b": 1.0, "c_norm": 1.0, "l_y": 1.0, "l_lambda": 1.0}
    assert theory.stationary_bias_bound(distances=np.zeros(5), **known) == 0
    with pytest.raises(ValueError, match="distances is"):
        theory.stationary_bias_bound(distances=[0.1, -0.1], **known)
    with pytest.raises(ValueError, match="eta_a is 1"):
        theory.stationary_bias_bound(distances=0.1, **{**known, "eta_a": 1.0})


# ------------------------------------------------------------------ figure 1


@pytest.fixture
def figure1() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figure1", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_figure_1_is_a_table_and_two_files(
    figure1: ModuleType, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure1.main([str(tmp_path)])
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "eta"
    assert [float(word) for word in rows[5].split()][:2] == [0.5, 2.309]
    assert {file.name for file in tmp_path.iterdir()} == {"figure1.png", "figure1.svg"}


def test_figure_1_without_matplotlib_is_a_table(
    figure1: ModuleType,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    figure1.main([str(tmp_path)])
    out = capsys.readouterr().out
    assert "2.309" in out
    assert "install matplotlib" in out
    assert not list(tmp_path.iterdir())
