"""What `import hdet` shows, and what it says of names that are elsewhere."""

from __future__ import annotations

import importlib
import inspect
import operator
import re
from importlib.util import find_spec

import pytest

import hdet

# What `hdet.__all__` held in 0.1.0 and does not hold any more.
MOVED = """
WSD Analytic Arcsine Calibrate CheckpointError CheckpointFolder Comparison ConfigError Constant Context Contrast
Controller Cosine Design DivergedError Divergent Estimate Estimator Evidence Fixed FixedWindow FromCallable Gated
Geometric GrowingWindow Hadamard HdetError HeldOneCycle Hold IdentifiabilityError Kalman LatinHypercube LeastSquares
Line Linear Log Logit LostRankError Marginal MatchError Mean Merge MissingExtraError MixedDifference Newton OneCycle
OneSided Paper Permutation Recursion Regularize Relative Replay Schedule Softmax Space Spec Spread Stateful StepError
Symmetric TrainingLoss TwoLevel WindowRecord Windows register
"""


def test_about_forty_names_are_shown_and_all_are_there() -> None:
    assert 36 <= len(hdet.__all__) <= 46
    assert all(hasattr(hdet, name) for name in hdet.__all__)


def test_dir_shows_the_version_and_every_family() -> None:
    shown = {name for name, _ in inspect.getmembers(hdet)}  # which asks for each
    assert shown == set(dir(hdet)) == {*hdet.__all__, "__version__", "errors", "history", "signals", "spec", "trials"}
    assert dir(hdet) == sorted(shown)
    for family in ("errors", "history", "signals", "spec", "windows"):
        module = importlib.import_module(f"hdet.{family}")
        assert all(hasattr(module, name) for name in module.__all__)


def test_a_name_that_moved_is_told_where_it_is() -> None:
    for name in MOVED.split():
        assert not hasattr(hdet, name)
        with pytest.raises(AttributeError, match=f"'hdet' has no attribute '{name}': it is hdet") as told:
            getattr(hdet, name)
        path = re.split("it is hdet.", str(told.value))[1]
        assert path.split(".")[0] in {*hdet.__all__, "history", "signals", "spec"}, path
        assert operator.attrgetter(path)(hdet).__name__ == name
    with pytest.raises(ImportError, match=r"^cannot import name 'Line' from 'hdet': it is hdet\.evidence\.Line$"):
        from hdet import Line  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'Lines' from 'hdet'"):
        from hdet import Lines  # noqa: F401


@pytest.mark.parametrize("name", ["Lines", "np", "Any", "Path", "strict"])
def test_a_name_that_a_module_merely_imports_is_no_name_of_hdet(name: str) -> None:
    assert not hasattr(hdet, name)
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'$"):
        getattr(hdet, name)


NEEDS = {"fabric": "lightning", "lightning": "lightning", "torchft": "torchft", "transformers": "transformers"}
"""By integration, the package that it imports, which is that of its extra; the others import none."""


@pytest.mark.parametrize("name", sorted(hdet._INTEGRATIONS))
def test_an_integration_is_a_module_that_can_be_imported_by_name(name: str) -> None:
    """`from hdet.transformers import Search` as well as `hdet.transformers.Search`; without it the extra is named."""
    package = NEEDS.get(name)
    if package is not None and find_spec(package) is None:
        with pytest.raises(hdet.errors.MissingExtraError, match=rf"hdet\[{package}\]"):
            importlib.import_module(f"hdet.{name}")
        return
    module = importlib.import_module(f"hdet.{name}")
    assert module is getattr(hdet, name)
    for shown in module.__all__:
        assert getattr(module, shown).__module__ == f"hdet.integrations.{name}"
