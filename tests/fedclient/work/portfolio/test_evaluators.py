"""Our evaluators beside scikit-learn's own predictions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attune.fedclient.work.portfolio.evaluators import LEAST, evaluator
from attune.fedclient.work.portfolio.fitting import NAMES, TREES, Samples, fits_for


@st.composite
def data(draw, task, least=6):
    """Draw training samples and further ones, with ties, constant features and classes of one sample."""
    seed, rows, features = draw(st.integers(0, 10_000)), draw(st.integers(least, 40)), draw(st.integers(1, 6))
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows + 10, features)).round(draw(st.sampled_from([0, 1, 6]))).astype(np.float32)
    if draw(st.booleans()):
        x[:, 0] = 1.0
    if task == "classes":
        y = rng.integers(0, draw(st.integers(1, 4)), rows) + draw(st.integers(0, 2))
    elif task == "multilabel":
        y = rng.integers(0, 2, (rows, draw(st.integers(1, 3)))).astype(np.float32)
        y[:, 0] = draw(st.sampled_from([0.0, 1.0])) if draw(st.booleans()) else y[:, 0]
    else:
        y = rng.normal(size=(rows, draw(st.integers(1, 2)))).astype(np.float32)
    return Samples(x[:rows], y, task, draw(st.sampled_from(["tabular", "images"]))), x[rows:]


def ours(name, samples, x, outputs):
    """Return the probabilities, or numbers, of our evaluator, without the floor of a probability."""
    scores = (
        evaluator(name, fits_for(samples)[name](samples).tensors, samples.task, outputs)(torch.from_numpy(x)).double().numpy()
    )
    if samples.task == "classes":
        return np.exp(scores) * (1 + outputs * LEAST) - LEAST
    return (1 / (1 + np.exp(-scores))) * (1 + 2 * LEAST) - LEAST if samples.task == "multilabel" else scores


def scaled(samples, x):
    """Return training and further features as a linear model takes them."""
    axis = None if samples.kind == "images" else 0
    mean, std = samples.x.astype(float).mean(axis=axis), samples.x.astype(float).std(axis=axis)
    return tuple((each - mean) / np.where(std > 0, std, 1.0) for each in (samples.x, x))


def spread(probability, classes, outputs):
    """Return probabilities of all of the plan's classes."""
    whole = np.zeros((len(probability), outputs))
    whole[:, classes] = probability
    return whole


@settings(max_examples=20)  # each fits two forests
@given(data("classes"))
def test_classes_have_scikit_learns_probabilities(drawn):
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression

    samples, x = drawn
    forest = RandomForestClassifier(TREES, random_state=0).fit(samples.x, samples.y)
    wanted = spread(forest.predict_proba(x), forest.classes_, 7)
    assert ours("forest", samples, x, 7) == pytest.approx(wanted, abs=1e-5)
    known = np.unique(samples.y)
    if len(known) == 1:
        assert ours("logistic", samples, x, 7) == pytest.approx(spread(np.ones((len(x), 1)), known, 7), abs=1e-5)
    else:
        trained, new = scaled(samples, x)
        model = LogisticRegression(max_iter=300).fit(trained, samples.y)
        assert ours("logistic", samples, x, 7) == pytest.approx(spread(model.predict_proba(new), known, 7), abs=1e-5)


@settings(max_examples=20)  # each fits two forests
@given(data("regression"))
def test_numbers_are_scikit_learns(drawn):
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.linear_model import RidgeCV

    samples, x = drawn
    y = samples.y[:, 0] if samples.y.shape[1] == 1 else samples.y
    trained, new = scaled(samples, x)
    ridge = RidgeCV(alphas=np.logspace(-2, 4, 13)).fit(trained, samples.y).predict(new)
    forest = RandomForestRegressor(TREES, random_state=0).fit(samples.x, y).predict(x)
    assert ours("ridge", samples, x, samples.y.shape[1]) == pytest.approx(ridge.reshape(len(x), -1), abs=1e-4)
    assert ours("forest", samples, x, samples.y.shape[1]) == pytest.approx(forest.reshape(len(x), -1), abs=1e-4)


@settings(max_examples=20)  # each fits two forests
@given(data("multilabel"))
def test_labels_have_scikit_learns_probabilities(drawn):
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression

    samples, x = drawn
    trained, new = scaled(samples, x)
    for label, y in enumerate(samples.y.T):
        if len(np.unique(y)) == 2:
            wanted = LogisticRegression(max_iter=300).fit(trained, y).predict_proba(new)[:, 1]
        else:
            wanted = np.full(len(x), y[0])
        assert ours("logistic", samples, x, samples.y.shape[1])[:, label] == pytest.approx(wanted, abs=1e-5)
    y = samples.y[:, 0] if samples.y.shape[1] == 1 else samples.y
    forest = RandomForestClassifier(TREES, random_state=0).fit(samples.x, y)
    tables, known = forest.predict_proba(x), forest.classes_
    tables, known = (tables, known) if isinstance(tables, list) else ([tables], [known])
    for label, (table, classes) in enumerate(zip(tables, known, strict=True)):
        assert ours("forest", samples, x, samples.y.shape[1])[:, label] == pytest.approx(table @ classes, abs=1e-5)


@given(st.sampled_from(["classes", "regression", "multilabel"]).flatmap(data), st.sampled_from([1, 3]))
def test_neighbours_are_scikit_learns_where_no_distances_are_equal(drawn, k):
    from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor

    samples, x = drawn
    apart = np.random.default_rng(0).normal(size=samples.x.shape).astype(np.float32)
    samples = samples._replace(x=apart)
    new = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
    outputs = 7 if samples.task == "classes" else samples.y.shape[1]
    if samples.task == "classes":
        model = KNeighborsClassifier(k).fit(apart, samples.y)
        wanted = spread(model.predict_proba(new), model.classes_, outputs)
    else:
        wanted = KNeighborsRegressor(k).fit(apart, samples.y).predict(new)
    assert ours(f"nearest-{k}", samples, new, outputs) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(("classes", "task"), [(2, "classes"), (4, "classes"), (1, "regression")])
def test_boosting_is_scikit_learns(classes, task):
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    rng = np.random.default_rng(3)
    x = rng.normal(size=(1100, 5)).astype(np.float32)
    score = x[:, 0] + np.sin(3 * x[:, 1]) + rng.normal(size=1100) / 2
    y = np.digitize(score, np.quantile(score, np.arange(1, classes) / classes)) + 1 if task == "classes" else score[:, None]
    samples = Samples(x[:1050], y[:1050].astype(np.int64 if task == "classes" else np.float32), task, "tabular")
    assert list(fits_for(samples)) == [name for name in NAMES if name in fits_for(samples)], "in the order of NAMES"
    if task == "classes":
        model = HistGradientBoostingClassifier(random_state=0).fit(samples.x.astype(float), samples.y)
        wanted = spread(model.predict_proba(x[1050:].astype(float)), model.classes_, 6)
        assert ours("boosting", samples, x[1050:], 6) == pytest.approx(wanted, abs=1e-4)
    else:
        model = HistGradientBoostingRegressor(random_state=0).fit(samples.x.astype(float), samples.y.ravel())
        assert ours("boosting", samples, x[1050:], 1)[:, 0] == pytest.approx(model.predict(x[1050:].astype(float)), abs=1e-4)


def test_a_single_sample_of_a_feature_is_no_division_by_zero():
    samples = Samples(np.ones((1, 2), np.float32), np.array([3]), "classes", "tabular")
    for name, fit in fits_for(samples).items():
        scores = evaluator(name, fit(samples).tensors, "classes", 5)(torch.zeros(2, 2))
        assert scores.isfinite().all() and scores.argmax(1).tolist() == [3, 3], name


def test_cox_is_the_most_probable_by_hand():
    """Two samples, events in order 1, 0: the risk set of the first event has both, of the second itself."""
    samples = Samples(np.array([[1.0], [-1.0]], np.float32), np.array([[1, 1], [2, 1]], np.float32), "survival", "tabular")
    weight = float(fits_for(samples)["cox"](samples).tensors["weight"])
    grid = np.linspace(-3, 3, 600_001)  # -log(e^w / (e^w + e^-w)) / 2 events + w^2 / 4
    assert weight == pytest.approx(grid[(np.log1p(np.exp(-2 * grid)) / 2 + grid**2 / 4).argmin()], abs=1e-4)
