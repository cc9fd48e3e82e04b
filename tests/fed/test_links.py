"""Links: the weights of every kind, their means against enumeration, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fed.graphs import graphs, metropolis_of, shares
from fedbilevel import links
from fedbilevel.adjoint import HGP, RecurrentBackpropagation
from fedbilevel.fed.mixing import connected, fastest_mixing, feasible
from fedbilevel.fed.network import Network, Reversed, edges
from fedbilevel.fed.network_check import check_both_ways, check_push_sum

pytestmark = pytest.mark.usefixtures("float64")

KEY = jr.key(0)
CHANCES = np.array([[0.3, 0.7, 0.2], [0.4, 1.0, 0.9], [0.55, 0.0, 0.1]])
EVEN = np.array([[0.3, 0.7, 0.2], [0.7, 1.0, 0.9], [0.2, 0.9, 0.1]])


def weights(kind: links.Links, n: int, key: Any = KEY, time: int = 0) -> Any:
    return np.asarray(kind.weights(key, n, time))


# -------------------------------------------------------------------- fixed links


def test_weights_of_fixed_links() -> None:
    np.testing.assert_array_equal(weights(links.Complete(), 4), np.full((4, 4), 0.25))
    around = np.eye(5) + np.roll(np.eye(5), 1, axis=0)
    np.testing.assert_array_equal(weights(links.Ring(directed=True), 5), around / 2)
    both = around + np.roll(np.eye(5), -1, axis=0)
    np.testing.assert_allclose(weights(links.Ring(), 5), both / 3, rtol=1e-15)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("kind", [links.Complete(), links.Ring(), links.Ring(directed=True)])
def test_in_small_circles_neighbours_coincide(kind: links.Links, n: int) -> None:
    drawn = weights(kind, n)
    np.testing.assert_allclose(drawn.sum(axis=0), 1, rtol=1e-15)
    assert np.all(drawn.diagonal() > 0)
    check_push_sum(kind.network(n))


def test_given_weights_come_back_as_they_are_even_if_a_column_sums_to_zero() -> None:
    laplacian = np.array([[1.0, -0.5, 0.0], [-1.0, 0.1, 0.3], [0.0, 0.4, 0.0]])
    np.testing.assert_array_equal(weights(links.Given(laplacian), 3), laplacian)


def test_a_schedule_serves_its_matrices_again_and_again() -> None:
    matrices = [np.eye(2), np.full((2, 2), 0.5), np.array([[0.0, 1.0], [1.0, 0.0]])]
    schedule = links.Given(matrices)
    for time in range(7):
        np.testing.assert_array_equal(weights(schedule, 2, time=time), matrices[time % 3])
    np.testing.assert_array_equal(schedule.network(2).heard(), [[2 / 3, 2 / 3], [2 / 3, 2 / 3]])
    np.testing.assert_allclose(schedule.network(2).expected(), [[0.5, 0.5], [0.5, 0.5]])


def test_random_graphs_are_connected_and_doubly_stochastic() -> None:
    found = [links.ErdosRenyi(0.4, seed=seed).network(7) for seed in range(6)]
    for network in found:
        matrix = np.asarray(network.base[0])
        assert connected(matrix > 0)
        np.testing.assert_array_equal(matrix, matrix.T)
        np.testing.assert_allclose(matrix, metropolis_of(matrix != 0), rtol=1e-15)
        np.testing.assert_allclose(matrix.sum(axis=0), 1, rtol=1e-15)
        np.testing.assert_array_equal(network.heard() > 0, matrix != 0)
    assert len({np.asarray(network.base).tobytes() for network in found}) == 6
    assert np.count_nonzero(found[0].base) < 49, "some links must be missing"


def test_the_fastest_chain_mixes_faster_than_metropolis() -> None:
    pytest.importorskip("cvxpy")
    for seed in (0, 1):
        slow, fast = (
            np.asarray(links.ErdosRenyi(0.4, mixing=rule, seed=seed).network(6).base[0])
            for rule in ("metropolis", "fastest")
        )
        np.testing.assert_array_equal(fast[slow == 0], 0)
        np.testing.assert_array_equal(fast, fast.T)
        assert fast.min() >= 0
        np.testing.assert_allclose(fast.sum(axis=0), 1, rtol=1e-14)
        assert second_eigenvalue(fast) < second_eigenvalue(slow) - 0.01


def test_the_fastest_chain_of_a_path_of_three_is_known() -> None:
    """Weights 1/2 on both links: eigenvalues 1, 1/2, −1/2, and no others have smaller ones."""
    pytest.importorskip("cvxpy")
    path = np.array([[1, 1, 0], [1, 1, 1], [0, 1, 1]], bool)
    np.testing.assert_allclose(fastest_mixing(path), [[0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]], atol=1e-4)


@pytest.mark.parametrize("seed", range(10))
def test_what_a_solver_gives_becomes_weights_that_push_sum_takes(seed: int) -> None:
    """Row sums of one leave nothing for the diagonal, and rounding may make it less than that."""
    n, draws = 100, np.random.default_rng(seed)
    graph = np.triu(draws.random((n, n)) < 0.4, 1)
    graph = graph | graph.T | np.eye(n, dtype=bool)
    weights = feasible(draws.normal(1, 1, (n, n)), graph)
    assert weights.min() >= 0
    np.testing.assert_array_equal(weights, weights.T)
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-14)
    assert not weights[~graph].any()


def second_eigenvalue(matrix: Any) -> float:
    return float(np.sort(np.abs(np.linalg.eigvalsh(matrix)))[-2])


def test_without_the_solver_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cvxpy", None)
    with pytest.raises(ImportError, match=r"pip install \"fedbilevel\[networks\]\".*mixing=.metropolis"):
        links.ErdosRenyi(1.0, mixing="fastest").network(3)


# ------------------------------------------------------------------- random links


def test_probabilities_of_one_and_zero_say_exactly_who_hears_whom() -> None:
    """`[i, j]` is how often i hears j, not the contrary."""
    sure = np.array([[0, 1, 0], [0, 0, 1], [1, 1, 0]], float)
    drawn = weights(links.Stochastic(probability=sure), 3)
    np.testing.assert_allclose(drawn, shares(sure.astype(bool) | np.eye(3, dtype=bool)), rtol=1e-15)


def test_probabilities_are_drawn_once_from_the_seed() -> None:
    network = links.Stochastic(0.4, 0.8, seed=1).network(6)
    again, other = (links.Stochastic(0.4, 0.8, seed=seed).network(6) for seed in (1, 2))
    chances = np.asarray(network.probability)
    assert chances.min() >= 0.4
    assert chances.max() <= 0.8
    assert np.any(chances[0] != chances[0].T)
    np.testing.assert_array_equal(chances, again.probability)
    assert np.any(chances != np.asarray(other.probability))
    undirected = np.asarray(links.Stochastic(0.4, 0.8, directed=False).network(6).probability[0])
    np.testing.assert_array_equal(undirected, undirected.T)


@pytest.mark.parametrize(("chances", "directed"), [(CHANCES, True), (EVEN, False)])
def test_mean_weights_and_frequencies_are_those_of_all_sets_of_links(chances: Any, directed: bool) -> None:
    network = links.Stochastic(probability=chances, directed=directed).network(3)
    sets = list(graphs(chances, undirected=not directed))
    assert sum(chance for chance, _ in sets) == pytest.approx(1)
    np.testing.assert_allclose(network.expected(), sum(p * shares(g) for p, g in sets), rtol=1e-13)
    np.testing.assert_allclose(network.heard(), sum(p * g for p, g in sets), rtol=1e-13)


def test_mean_weights_where_some_links_never_exist() -> None:
    """The sender shares among those present of its own links only; four clients in a circle."""
    around = weights(links.Ring(), 4)
    network = Network(around[None], np.full((1, 4, 4), 0.3))
    sets = list(graphs(np.where(around != 0, 0.3, 0.0), undirected=False))
    np.testing.assert_allclose(network.expected(), sum(p * shares(g) for p, g in sets), rtol=1e-13)
    np.testing.assert_allclose(network.heard(), sum(p * g for p, g in sets), rtol=1e-12)


def test_links_that_are_always_there_have_their_weights_as_means() -> None:
    uneven = np.array([[0.5, 0.2], [0.5, 0.8]])
    np.testing.assert_array_equal(links.Given(uneven).network(2).expected(), uneven)
    balanced = links.Stochastic(probability=1.0, directed=False, balanced=True).network(3)
    np.testing.assert_allclose(balanced.expected(), np.full((3, 3), 1 / 3), rtol=1e-15)


@pytest.mark.parametrize(
    "network",
    [
        links.Stochastic(directed=False, balanced=True).network(3),
        Network(np.array([[[0.5, 0.2], [0.5, 0.8]]]), np.full((1, 2, 2), 0.5)),
    ],
)
def test_means_without_closed_form_are_refused(network: Network) -> None:
    check_push_sum(network)
    with pytest.raises(ValueError, match=r"no closed form.*statistics=\"estimated\""):
        network.expected()


def test_absent_links_leave_their_share_to_the_others_in_proportion() -> None:
    base = np.array([[0.5, 0.2, 0.3], [0.1, 0.3, 0.3], [0.4, 0.5, 0.4]])
    sure = np.array([[0, 1, 0], [1, 0, 1], [0, 1, 0]], float)
    drawn = np.asarray(Network(base[None], sure[None]).draw(KEY))
    np.testing.assert_allclose(drawn[:, 0], [0.5 / 0.6, 0.1 / 0.6, 0], rtol=1e-15)
    np.testing.assert_array_equal(drawn[:, 1], base[:, 1])
    np.testing.assert_allclose(drawn[:, 2], [0, 0.3 / 0.7, 0.4 / 0.7], rtol=1e-15)


def test_reversed_links_are_the_transposed_draw() -> None:
    kind = links.Stochastic(seed=3)
    np.testing.assert_array_equal(weights(Reversed(kind), 5), weights(kind, 5).T)
    with pytest.raises(TypeError, match="known exchange by exchange only"):
        Reversed(kind).network(5)


def test_messages_are_counted_off_the_diagonal() -> None:
    assert int(edges(jnp.asarray([[0.5, 0.0], [0.5, 1.0]]))) == 1
    assert int(edges(jnp.ones((4, 4)))) == 12


def test_a_draw_is_one_program_for_all_graphs() -> None:
    traced = []

    @jax.jit
    def draw(network: Network, key: Any) -> Any:
        traced.append(1)
        return network.draw(key)

    kinds = (links.Complete(), links.Ring(), links.ErdosRenyi(), links.Stochastic(), links.Given(np.eye(4)))
    undirected = (links.Stochastic(directed=False), links.Stochastic(directed=False, balanced=True))
    for kind in (*kinds, *undirected):
        np.testing.assert_allclose(draw(kind.network(4), KEY), weights(kind, 4), rtol=1e-15)
    assert len(traced) == 1


# ------------------------------------------------------------------ what is refused


def test_push_sum_refuses_columns_that_do_not_sum_to_one() -> None:
    by_rows = np.array([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.2, 0.2, 0.6]])
    with pytest.raises(ValueError, match=r"client 0 gives away weights that sum to \[0\.7\].*sum to one"):
        check_push_sum(links.Given(by_rows).network(3))
    check_push_sum(links.Given(by_rows.T).network(3))


def test_push_sum_refuses_negative_weights() -> None:
    with pytest.raises(ValueError, match="at least 0; a weight is negative"):
        check_push_sum(links.Given([[1.5, 0.5], [-0.5, 0.5]]).network(2))


@pytest.mark.parametrize(
    "kind",
    [
        links.Given(np.eye(3)),
        links.Given([[0.5, 0.0], [0.5, 1.0]]),
        links.Stochastic(probability=[[1, 0, 0], [1, 1, 0], [1, 1, 1]]),
    ],
    ids=["nobody hears", "one never hears", "one is never heard"],
)
def test_push_sum_refuses_disconnected_clients(kind: links.Links) -> None:
    n = 2 if isinstance(kind, links.Given) and kind.matrix.shape[0] == 2 else 3
    with pytest.raises(ValueError, match=r"never hears, even by others.*no consensus"):
        check_push_sum(kind.network(n))


def test_push_sum_refuses_to_lose_the_mass_of_whom_nobody_may_hear() -> None:
    swap = np.array([[[0.0, 1.0], [1.0, 0.0]]])
    check_push_sum(Network(swap, np.ones((1, 2, 2))))
    with pytest.raises(ValueError, match=r"client 0 gives itself no weight.*mass would be lost"):
        check_push_sum(Network(swap, np.full((1, 2, 2), 0.5)))


def test_graphs_that_are_never_connected_are_refused() -> None:
    with pytest.raises(ValueError, match=r"none of 1000 .* of 5 clients .* probability 0\.0 .* raise"):
        links.ErdosRenyi(0.0).network(5)


def test_hypergradient_push_refuses_a_one_way_ring() -> None:
    ring = links.Ring(directed=True).network(4)
    check_push_sum(ring)
    with pytest.raises(ValueError, match=r"client 0 hears client 3, but 3 never hears 0 \(4 such links\)"):
        HGP(3).check(ring)
    with pytest.raises(ValueError, match="both ways"):
        check_both_ways(ring)
    HGP(3, outer="local").check(ring)  # asks nobody


def test_links_both_ways_at_different_times_will_do_for_hypergradient_push() -> None:
    ways = links.Given([[[0.5, 0.0], [0.5, 1.0]], [[1.0, 0.5], [0.0, 0.5]]]).network(2)
    with pytest.warns(UserWarning, match="biased"):  # a schedule, but not refused
        HGP(3).check(ways)
    HGP(3).check(links.Stochastic().network(4))
    with pytest.raises(ValueError, match="links must be undirected"):
        RecurrentBackpropagation(3).check(ways)


@pytest.mark.parametrize("kind", [links.Stochastic(), links.Ring(directed=True)])
def test_exact_backpropagation_refuses_directed_links(kind: links.Links) -> None:
    with pytest.raises(ValueError, match=r"links must be undirected.*HGP, VRHGP"):
        RecurrentBackpropagation(3).check(kind.network(4))


@pytest.mark.parametrize("kind", [links.Ring(), links.ErdosRenyi(), links.Stochastic(directed=False)])
def test_exact_backpropagation_takes_undirected_links(kind: links.Links) -> None:
    RecurrentBackpropagation(3).check(kind.network(4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: links.Stochastic(0.4, 1.2), r"between 0 and 1; got \[0\.4, 1\.2\]"),
        (lambda: links.Stochastic(-0.1), "between 0 and 1"),
        (lambda: links.Stochastic(float("nan")), "between 0 and 1"),
        (lambda: links.Stochastic(probability=[[0.5, 2.0], [0.5, 0.5]]), "between 0 and 1"),
        (lambda: links.Stochastic(0.8, 0.4), r"low is 0\.8 and high 0\.4"),
        (lambda: links.Stochastic(balanced=True), "balanced weights need undirected links"),
        (lambda: links.Stochastic(probability=CHANCES, directed=False), "need symmetric probabilities"),
        (
            lambda: links.Stochastic(probability=CHANCES).network(4),
            r"shape \(3, 3\); 4 clients need \(4, 4\)",
        ),
        (lambda: links.ErdosRenyi(1.5), "between 0 and 1"),
        (lambda: links.Stochastic(probability="0.5"), r"between 0 and 1; got 0\.5"),
        (lambda: links.Given("ring"), "a square matrix of numbers.*; got 'ring'"),
        (
            lambda: links.Given([[0.5, 0.5], [0.5]]),
            r"a square matrix of numbers.*; got \[\[0\.5, 0\.5\], \[0",
        ),
        (
            lambda: links.ErdosRenyi(mixing="fast"),
            'mixing is \'fast\'; it must be "metropolis" or "fastest"',
        ),
        (lambda: links.Given(np.eye(3)).network(4), "the links are for 3 clients, but 4 take part"),
        (lambda: links.Complete().network(3).network(4), "the links are for 3 clients, but 4 take part"),
        (lambda: Network(np.eye(3), np.eye(3)), r"shape \(times, n, n\); got \[\(3, 3\)\]"),
    ],
)
def test_mistakes_are_explained(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
