"""What `import hdet` shows, and what it says of names that are elsewhere."""

from __future__ import annotations

import operator
import re

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
    assert dir(hdet) == sorted(hdet.__all__)
    assert 36 <= len(hdet.__all__) <= 44
    assert all(hasattr(hdet, name) for name in hdet.__all__)


def test_a_name_that_moved_is_told_where_it_is() -> None:
    for name in MOVED.split():
        with pytest.raises(AttributeError, match=f"no attribute '{name}'; it is hdet") as told:
            getattr(hdet, name)
        path = re.split("it is hdet.", str(told.value))[1]
        assert path.split(".")[0] in {*hdet.__all__, "history", "signals", "spec"}, path
        assert operator.attrgetter(path)(hdet).__name__ == name
    with pytest.raises(AttributeError, match=r"no attribute 'Lines'$"):
        _ = hdet.Lines
