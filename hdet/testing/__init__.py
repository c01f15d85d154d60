"""The conformance suite: laws that every knob, space, spread, design, schedule, window rule, estimator,
controller, evidence and merge keeps, built in or your own.

As a call, which raises at the first law that does not hold:

    hdet.testing.check(MySpread(0.1))

or under pytest, one test a law:

    @pytest.mark.parametrize("law", hdet.testing.laws(MySpread(0.1)), ids=str)
    def test_my_spread(law):
        law()

Needs numpy and torch only.
"""

from hdet.testing.ground import Ground
from hdet.testing.law import Law, LawError
from hdet.testing.suite import check, laws

__all__ = ["Ground", "Law", "LawError", "check", "laws"]
