"""Reasons to move a base; see `hdet.controllers.Ruled`.

| for | rules |
|---|---|
| a learning rate, at last and averaged weights | `Lower`, `Stall`, `WarmUp`, `Raise`, `Return` |
| a learning rate, early in its warm-up | `CutBack`, `Regain`, `LookAhead`, `AwaitSchedule`, `CatchUp` |
| a learning rate, as its schedule falls | `Fall` |
| a weight decay, judged by its formula | `Spare`, `Leap`, `SlopeSum` |
"""

from hdet.controllers.rules.await_schedule import AwaitSchedule
from hdet.controllers.rules.catch_up import CatchUp
from hdet.controllers.rules.cut_back import CutBack
from hdet.controllers.rules.fall import Fall
from hdet.controllers.rules.leap import Leap
from hdet.controllers.rules.look_ahead import LookAhead
from hdet.controllers.rules.lower import Lower
from hdet.controllers.rules.raising import Raise
from hdet.controllers.rules.regain import Regain
from hdet.controllers.rules.returning import Return
from hdet.controllers.rules.slope_sum import SlopeSum
from hdet.controllers.rules.spare import Spare
from hdet.controllers.rules.stall import Stall
from hdet.controllers.rules.warm_up import WarmUp

__all__ = [
    "AwaitSchedule",
    "CatchUp",
    "CutBack",
    "Fall",
    "Leap",
    "LookAhead",
    "Lower",
    "Raise",
    "Regain",
    "Return",
    "SlopeSum",
    "Spare",
    "Stall",
    "WarmUp",
]
