"""From settings to what `solve` takes."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from experiment.tiny import IMAGES, SADDLE, changed, plan, write
from fedbilevel.data.error import DataError
from fedbilevel.experiment.build import build, data_of
from fedbilevel.experiment.config import plans
from fedbilevel.experiment.registry import ConfigError


def test_the_objects_are_those_of_the_python_api(tmp_path: Any) -> None:
    text = SADDLE + '\n[engine]\nkind = "simulator"\nchunk = 2\n[best]\nmetric = "error"\npatience = 3\n'
    built = build(plan(tmp_path, text))
    known = fb.Saddle.random(jax.random.key(0), 3, 2, centred=False)
    np.testing.assert_array_equal(built.problem.x0, known.problem().x0)
    np.testing.assert_array_equal(built.clients.lower.flat["b"], known.clients().lower.flat["b"])
    assert built.algorithm == fb.FedAvgS(0.05, 0.1, cohort=2)
    assert built.engine == fb.Simulator(chunk=2)
    assert built.best == fb.Best("error", patience=3)
    assert build(plan(tmp_path)).best is None


def test_all_seeds_solve_the_same_problem_and_the_data_seed_draws_it(tmp_path: Any) -> None:
    file = write(tmp_path)
    first, second = (build(one).clients.lower.flat["b"] for one in plans(file, seeds=[0, 1]))
    np.testing.assert_array_equal(first, second)
    other = build(plans(file, changes={"data.seed": 5})[0]).clients.lower.flat["b"]
    np.testing.assert_array_equal(other, fb.Saddle.random(jax.random.key(5), 3, 2, centred=False).b)


def test_runs_of_one_problem_share_their_clients(tmp_path: Any) -> None:
    """What `sweep` needs to run them together."""
    builts = [
        build(one) for one in plans(write(tmp_path), grid={"algorithm.upper_lr": [0.1, 0.2]}, seeds=[0, 1])
    ]
    assert len({id(built.clients) for built in builts}) == 1


def test_precisions_do_not_mix(tmp_path: Any) -> None:
    kinds = {}
    for x64 in (False, True, False):
        with jax.enable_x64(x64):
            built = build(plan(tmp_path))
            kinds[x64] = built.problem.x0.dtype, built.clients.lower.flat["b"].dtype
    assert kinds == {False: (jnp.float32, jnp.float32), True: (jnp.float64, jnp.float64)}


def test_options_of_the_clients_stand_in_the_data_table(tmp_path: Any) -> None:
    text = changed(SADDLE, ('"Saddle"', '"Quadratic"'), ("d = 2\ncentred = false", "dx = 2\ndy = 2"))
    text = changed(text, ('"FedAvgS"', '"FedNest"')) + "\n[data]\nsamples = 4\nnoise = 0.5\nbatch_size = 2\n"
    samples = build(plan(tmp_path, text)).clients.lower
    assert (samples.flat["b"].shape, samples.batch_size) == ((12, 2), 2)
    with pytest.raises(ConfigError, match=r"tiny\.toml: there is no data\.nois; did you mean 'noise'"):
        build(plan(tmp_path, changed(text, ("noise", "nois"))))


def test_a_problem_on_data_knows_them(tmp_path: Any) -> None:
    built = build(plan(tmp_path, IMAGES))
    dataset, clients, *_ = data_of(plan(tmp_path, IMAGES).config["data"])
    assert built.clients is clients
    assert clients.n == 4
    assert clients.lower.batch_size == 8
    assert len(dataset.classes) == 10
    assert np.shape(jax.tree.leaves(built.problem.y0)[0])[0] in (4, 784), "the model takes images of 28 × 28"


def test_validation_data_for_metrics_alone_and_test_data_dealt_out(tmp_path: Any) -> None:
    more = 'batch_size = 8\nupper = "training"\nwith_test = true\nshare = 0.05\n'
    text = changed(IMAGES, ("batch_size = 8\n", more), ("validation = 0.2", "validation = 0.2\ntest = 0.2"))
    built = build(plan(tmp_path, text))
    assert built.clients.upper is built.clients.lower
    assert built.clients.has_validation
    assert built.problem.metrics == {}, "the data set's test samples are not unseen any more"
    assert set(build(plan(tmp_path, IMAGES)).problem.metrics) == {"balanced_accuracy", "test_accuracy"}


DISTILLED = changed(
    IMAGES,
    ('kind = "LossTuning"', 'kind = "Classification"'),
    ('kind = "MLP"\nsizes = [4, 10]', 'kind = "FourLayerCNN"\nfilters = 2'),
    ("batch_size = 8", "batch_size = 8\npublic = 30"),
    ('"FedNest"\nupper_lr = 0.1\nlower_lr = 0.1', '"FedDF"'),
)
DISTILLED += (
    'learn = { kind = "SGD", learning_rate = 0.1 }\ndistil = { kind = "Adam", learning_rate = 0.01 }\n'
)


def test_public_samples_are_nobodys(tmp_path: Any) -> None:
    built = build(plan(tmp_path, DISTILLED))
    assert built.algorithm.public.shape == (30, 28, 28, 1)
    public, owned = (
        {row.tobytes() for row in np.asarray(part)}
        for part in (built.algorithm.public, built.clients.lower.flat["inputs"])
    )
    assert len(public) == 30
    assert not public & owned
    again = build(plan(tmp_path, DISTILLED, data__seed=1)).algorithm.public
    assert not np.array_equal(built.algorithm.public, again), "the data's seed draws them"


def test_a_method_that_needs_public_samples_says_so(tmp_path: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"FedDF learns from public samples: data\.public must say how many"
    ):
        build(plan(tmp_path, changed(DISTILLED, ("public = 30\n", ""))))
    with pytest.raises(DataError, match="10000 public samples are asked for, of 10000 training samples"):
        build(plan(tmp_path, changed(DISTILLED, ("public = 30\n", "public = 10000\n"))))


def test_the_seed_of_a_run_draws_the_model_and_not_the_data(tmp_path: Any) -> None:
    first, second = (build(one) for one in plans(write(tmp_path, IMAGES), seeds=[0, 1]))
    assert first.clients is second.clients
    leaves = [
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(b.problem.y0)]) for b in (first, second)
    ]
    assert not np.array_equal(*leaves)


def test_your_own_classes_can_be_named(tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "own_method.py").write_text(
        "from fedbilevel import FedAvgS, Saddle\n"
        "import jax\n\n\n"
        "def make(upper_lr: float = 0.5) -> FedAvgS:\n"
        "    return FedAvgS(upper_lr, 0.25)\n\n\n"
        "def pair(d: int):\n"
        "    known = Saddle.random(jax.random.key(1), 2, d)\n"
        "    return known.problem(), known.clients()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    text = 'steps = 1\nalgorithm = "own_method:make"\n[problem]\nkind = "own_method:pair"\nd = 3\n'
    built = build(plan(tmp_path, text))
    assert built.algorithm == fb.FedAvgS(0.5, 0.25)
    assert (built.clients.n, built.problem.x0.shape) == (2, (3,))
    sys.modules.pop("own_method")


MISTAKES = {
    "data set": (("mnist-mini", "mnist-mino"), "no data set 'mnist-mino'.*[Dd]id you mean 'mnist-mini'"),
    "data not there": (
        ('"mnist-mini"', '"mnist"\ndir = "nowhere"'),
        "'mnist' was not found[\\s\\S]*data get mnist",
    ),
    "data key": (("batch_size", "batchsize"), r"no data\.batchsize; did you mean 'batch_size'"),
    "batch size": (("batch_size = 8", "batch_size = 0"), "batch_size is 0; it must be a whole number"),
    "partition kind": (('"Shards"', '"Shard"'), r"data\.partition\.kind: .*'Shard'; did you mean 'Shards'"),
    "partition key": (("each = 2", "eech = 2"), r"no data\.partition\.eech; did you mean 'each'"),
    "partition size": (("clients = 4", "clients = 4000"), "needs at least 8000 samples.*fewer clients"),
    "partition": (
        ('[data.partition]\nkind = "Shards"\nclients = 4\neach = 2\n', ""),
        r"data\.partition is missing",
    ),
    "reading": (("batch_size", "read = 3\nbatch_size"), r"data\.read is 3; it must be a table"),
    "reading it": (("batch_size", "read.length = 9\nbatch_size"), "'length' is no setting of how"),
    "no name": (('name = "mnist-mini"\n', ""), r"data\.name is missing"),
    "split": (("[data.split]\nvalidation = 0.2", "[data.split]\nvalidation = 2.0"), "validation"),
    "split key": (("validation", "validaton"), r"no data\.split\.validaton; did you mean 'validation'"),
    "upper": (("batch_size = 8", 'upper = "trainin"'), "upper is 'trainin'.*did you mean 'training'"),
    "share": (("batch_size = 8", "share = 2"), "share is 2; it must be above 0 and at most 1"),
    "long tail": (("factor", "facto"), r"no data\.long_tail\.facto; did you mean 'factor'"),
    "model kind": (('"MLP"', '"MPL"'), r"problem\.model\.kind: there is no model 'MPL'; did you mean 'MLP'"),
    "model size": (("[4, 10]", "[4, 7]"), "one logit for each of the 10 classes"),
    "problem kind": (
        ('"LossTuning"', '"LossTunin"'),
        "there is no problem 'LossTunin'; did you mean 'LossTuning'",
    ),
    "method": (("upper_lr = 0.1", ""), r"algorithm\.upper_lr is missing: FedNest needs it"),
    "step size": (("upper_lr = 0.1", 'upper_lr = "a"'), r"algorithm\.upper_lr.* 'a'"),
    "terms": (("upper_lr = 0.1", "upper_lr = 0.1\nterms = 2.5"), "algorithm.*terms is 2.5; it must be"),
    "cohort": (
        ("upper_lr = 0.1", 'upper_lr = 0.1\ncohort = "many"'),
        "algorithm.*cohort is 'many'; it must be",
    ),
    "best": (("steps = 2", 'steps = 2\nbest.metrc = "error"'), r"no best\.metrc; did you mean 'metric'"),
    "best mode": (
        ("steps = 2", 'steps = 2\nbest = {metric = "a", mode = "b"}'),
        "best: mode is 'b'; it must be",
    ),
    "measure": (
        ("steps = 2", 'steps = 2\nmeasure = ["drift"]'),
        "no measure 'drift'; there are .*client_drift",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_an_error_with_file_key_and_advice(tmp_path: Any, case: str) -> None:
    change, message = MISTAKES[case]
    with pytest.raises((ConfigError, DataError), match=rf"^\S*tiny\.toml: (.|\n)*{message}"):
        build(plan(tmp_path, changed(IMAGES, change)))


def test_lists_of_kinds_are_those_of_the_place(tmp_path: Any) -> None:
    with pytest.raises(ConfigError) as error:
        build(plan(tmp_path, changed(IMAGES, ('"Shards"', '"Shard"'))))
    assert "Dirichlet" in str(error.value)
    assert "MLP" not in str(error.value)


def test_a_problem_with_its_own_data_takes_no_data_set(tmp_path: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"tiny\.toml: data\.name is 'mnist-mini', but Saddle brings its own"
    ):
        build(plan(tmp_path, SADDLE + '\n[data]\nname = "mnist-mini"\n'))


def test_a_size_below_zero_is_a_mistake_too(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"tiny\.toml: problem: "):
        build(plan(tmp_path, problem__d=-2))
