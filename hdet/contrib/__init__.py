"""Members that work and are tested, and that hdet itself does not use.

A member is here, and not in its family's module (`hdet.estimators`, `hdet.merges`, ...), while none of these holds:

- A default, a recipe, the overlay or an example uses it, or a study or benchmark that does not ask what it is worth.
- An error names it as the way out.
- Trainers offer it by that name, so that people look for it (`WSD`, and DiLoCo's `Outer`).
- It is how users bring in a function of their own (`FromCallable`).

To come in, a member needs all of these:

- It passes the conformance suite of its family (`hdet.testing.check`).
- It names its source, or derives its equation.
- Its docstring says what it is for, and its tests show that.

It imports what its family may import: torch only where the family does. `import hdet` registers it, so that YAML and
checkpoints name it by its kind as any other.
"""

from hdet.contrib.adam import Adam
from hdet.contrib.antithetic import Antithetic
from hdet.contrib.evolution import EvolutionStrategy
from hdet.contrib.fade import Fade
from hdet.contrib.gaussian import Gaussian
from hdet.contrib.geometric import Geometric
from hdet.contrib.grawa import Grawa
from hdet.contrib.kalman import Kalman
from hdet.contrib.marginal import Marginal
from hdet.contrib.weighted import Weighted

__all__ = [
    "Adam",
    "Antithetic",
    "EvolutionStrategy",
    "Fade",
    "Gaussian",
    "Geometric",
    "Grawa",
    "Kalman",
    "Marginal",
    "Weighted",
]
