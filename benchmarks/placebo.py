"""How often evidence on a knob without effect speaks: the t of every evidence, with a fixed probe and with fresh ones.

    python benchmarks/placebo.py             # 100 runs of 12 windows of each evidence, some minutes
    python benchmarks/placebo.py --runs 20

Training and probe losses are linear in the weights, with coefficients drawn around 0: no knob can make the expected
loss better or worse, and every sub-batch has a slope of its own. t of J = 8 sub-batches is Student's on 7 degrees of
freedom: |t| > 2 in 8.6 % of windows, above 2.43 (the quantile as unlikely as a normal deviate of 2) in 4.6 %. tau is
the evidence of the windows so far (a memory of 0.8), over its standard error,

    independent    t-statistics are added up, as though no window had to do with another
    by sub-batch   slopes are added up in each sub-batch, and their scatter tells the error: what `Gated` does

and should have a standard deviation of 1, and be above 1 in 32 % and above 2 in 4.6 % of windows.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import hdet
from hdet.controllers import Context, Estimate, Gated, Hold

WINDOWS, STEPS, WEIGHTS, SUB_BATCHES, EXAMPLES = 12, 16, 16, 8, 4
MEMORY = 0.8
CLIPS_HALF = 1.2
"""About half of the training gradients are longer."""
QUANTILE = 2.429  # of Student's t on 7 degrees of freedom, as unlikely as a normal deviate of 2
MOVES_NOTHING = Hold()
ONE_SEAT = "Contrast, one a step"
"""Of one micro-batch a step: 8 blocks make an estimate, in place of 16."""


class Flat(nn.Module):
    """loss = <w, dropout(x)>: of x around 0 it is flat in the mean, whatever is done to w or to the rate."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(WEIGHTS))
        self.dropout = hdet.nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        """[..., WEIGHTS] to [...]."""
        return self.dropout(x) @ self.w  # type: ignore[no-any-return]


def examples(*key: int, count: int) -> Tensor:
    """[count, WEIGHTS] around 0; a key's are the same whenever they are asked for."""
    return torch.from_numpy(np.random.default_rng(key).standard_normal((count, WEIGHTS))).float()


def estimates(knob: hdet.Knob, seed: int, fixed: bool, seats: int) -> list[Estimate]:
    """Of one run, window by window, for one knob that nothing moves; of so many micro-batches a step."""
    torch.manual_seed(seed)
    model = Flat()
    optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    if isinstance(knob, hdet.ClipNorm):
        hdet.clip_gradients(optimizer, norm=CLIPS_HALF)
    diverges = isinstance(knob.evidence, hdet.evidence.Divergent)
    replicas = hdet.replicate(model, optimizer, n=4) if diverges else hdet.micro_batches(model, optimizer, seats)
    probe = hdet.Probe(
        lambda model, x: model(x).mean(dim=1),
        lambda window: [
            examples(seed, 1, 0 if fixed else window, count=SUB_BATCHES * EXAMPLES).view(SUB_BATCHES, EXAMPLES, -1)
        ],
    )
    objective = hdet.Objective(
        lambda model, x: model(x).mean(),
        lambda window: list(examples(seed, 2, window, count=SUB_BATCHES * EXAMPLES).chunk(SUB_BATCHES)),
    )
    engine = hdet.Engine(
        replicas,
        [knob.replace(controller=MOVES_NOTHING)],
        window=STEPS,
        signal=probe,
        objective=objective,
        seed=seed,
        total_steps=WINDOWS * STEPS,
    )
    for step in range(WINDOWS * STEPS):
        losses = []
        for replica in engine.replicas:
            with replica:
                loss = replica.model(examples(seed, 3, step, replica.index, count=EXAMPLES)).mean()
                loss.backward()
            losses.append(loss.detach())
        engine.share_gradients()
        for own in engine.optimizers:
            own.step()
            own.zero_grad()
        engine.step(losses)
    found = []
    for record in engine.history:
        told = record.estimates[knob.label]
        for line in (told, told.get("averaged", told)):
            if math.isfinite(line["stderr"]):
                slopes, freedom = tuple(line["slopes"]), line["freedom"]
                found.append(Estimate(line["slope"], stderr=line["stderr"], slopes=slopes, freedom=freedom))
                break
    return found


def taus(windows: list[Estimate], rule: Gated, forget_sub_batches: bool) -> list[float]:
    """The accumulated t after each window."""
    state, found = rule.start(), []
    for estimate in windows:
        told = replace(estimate, slopes=()) if forget_sub_batches else estimate
        _, state = rule.step(state, told, Context())
        found.append(state.tau)
    return found


def placebos() -> Mapping[str, Callable[[], hdet.Knob]]:
    """A knob for each evidence."""
    return {
        "Line": lambda: hdet.LearningRate(evidence=hdet.evidence.Line(read_average_above=None)),
        "Analytic": lambda: hdet.WeightDecay(evidence=hdet.evidence.Analytic()),
        "Recursion": lambda: hdet.Beta1(evidence=hdet.evidence.Recursion()),
        "Recursion, clipping": lambda: hdet.ClipNorm(evidence=hdet.evidence.Recursion()),
        "Divergent": lambda: hdet.LearningRate(evidence=hdet.evidence.Divergent()),
        "MixedDifference": lambda: hdet.Dropout(evidence=hdet.evidence.MixedDifference(bound_from=0.0)),
        "Contrast, a window": lambda: hdet.Dropout(evidence=hdet.evidence.Contrast(bound_from=0.0)),
        ONE_SEAT: lambda: hdet.Dropout(evidence=hdet.evidence.Contrast(bound_from=0.0)),
        "Contrast, horizon 400": lambda: hdet.Dropout(evidence=hdet.evidence.Contrast(horizon=400, bound_from=0.0)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--evidence", nargs="+", choices=list(placebos()), default=list(placebos()))
    given = parser.parse_args()
    warnings.filterwarnings("ignore", "the probe is too small")
    rule = Gated(memory=MEMORY)
    print(f"{given.runs} runs of {WINDOWS} windows; share of windows, and the standard deviation of tau\n")
    print("                                |t| > 2  > 2.43 | tau, independent     | tau, by sub-batch")
    print("evidence               probe                    |   sd   > 1    > 2    |   sd   > 1    > 2")
    for name in given.evidence:
        for fixed in (True, False):
            seats = 1 if name == ONE_SEAT else 4
            runs = [estimates(placebos()[name](), seed, fixed, seats) for seed in range(given.runs)]
            t = np.abs([estimate.t for windows in runs for estimate in windows])
            line = f"{name:22s} {'fixed' if fixed else 'fresh':7s}  {np.mean(t > 2):6.1%} {np.mean(t > QUANTILE):6.1%} "
            for forget_sub_batches in (True, False):
                tau = np.concatenate([taus(windows, rule, forget_sub_batches) for windows in runs])
                line += f" | {tau.std():5.2f} {np.mean(np.abs(tau) > 1):6.1%} {np.mean(np.abs(tau) > 2):6.1%}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
