"""Learning rates of parameter groups found at the price of one: starts whose ratios between groups are wrong by ten.

    python benchmarks/group_rates.py                              # every task, one seed
    python benchmarks/group_rates.py --tasks tabular --seeds 3
    python benchmarks/group_rates.py --first-seed 3 --seeds 3     # seeds that nothing was chosen on
    python benchmarks/group_rates.py --again 0.15                 # groups compared at 15 % of the run, too
    python benchmarks/group_rates.py --tasks text_large gpt_400k --patterns -1   # larger GPTs, at right ratios
    python benchmarks/group_rates.py --cost                       # what thirty groups cost beside one
    python benchmarks/group_rates.py --worth                      # what each ratio is worth, and how far steps go
    python benchmarks/group_rates.py --trials                     # ratios from short trials before the run

Each task's parameters are in up to five groups. Their rates start sqrt(10) times above or below the best common rate,
in every pattern of an orthogonal array of eight rows, and once with the right ratios. The oracle is the best run of a
sweep of the common rate at right ratios. Regret is the test loss above the oracle's; every contender is given the
compute of one plain run, probes included, so it trains for fewer steps. Only learning rates are explored, and runs end
as the recipe's do (`hdet.TailAverage`).
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from held import BEST
from search_parts.contender import update
from search_parts.found import all_tasks
from search_parts.task import Problem, Setting, Task, named_groups
from search_parts.tasks.text_muon import of_muon
from torch import Tensor, nn
from torch.optim import Optimizer

import hdet
from hdet.evidence import GroupLines
from hdet.hparams.update import Groups
from hdet.overlay.split_groups import SplitGroups, by_matrix, group_names, kinds_of_optimizers
from hdet.recipes.recommended import choose, own_schedule
from hdet.schedules import LinearDecay, Schedule
from hdet.trials.bracket import Trial, minimum, next_rate

ROOT = 10**0.5
RIGHT = (0, 0, 0, 0, 0)
PATTERNS = (
    (1, 1, 1, 1, 1),
    (1, 1, 1, -1, -1),
    (1, -1, -1, 1, 1),
    (1, -1, -1, -1, -1),
    (-1, 1, -1, 1, -1),
    (-1, 1, -1, -1, 1),
    (-1, -1, 1, 1, -1),
    (-1, -1, 1, -1, 1),
)
"""Five columns of the orthogonal array L8: each pair of groups is in every combination equally often."""

Sort = Callable[[str, nn.Parameter], str]
Apart = Literal["one", "groups", "optimizers"]
"""What has a learning rate of its own: all parameters, each group, or each kind of optimizer in a chain."""


def of_gpt(name: str, parameter: nn.Parameter) -> str:
    """Embeddings, attention, MLP, head, and what is one-dimensional."""
    if parameter.dim() < 2:
        return "one-dimensional"
    if name.startswith("head"):
        return "head"
    return "attention" if "attention" in name else "mlp" if "mlp" in name else "embeddings"


def of_layers(name: str, parameter: nn.Parameter) -> str:
    """A group for the matrix of each layer, and one for what is one-dimensional."""
    return "one-dimensional" if parameter.dim() < 2 else name


@dataclass(frozen=True)
class Case:
    """A task of the search benchmark, how its parameters are grouped, and the best setting they have in common.

    Attributes:
        of: another version of the task, in place of the one of that name.
    """

    name: str
    sort: Sort
    best: Setting
    of: Task | None = None

    @property
    def task(self) -> Task:
        return self.of or all_tasks()[self.name]

    def begin(self, seed: int, lr: float, factors: Sequence[float]) -> tuple[Problem, nn.Module, Optimizer]:
        problem = self.task.problem(seed, self.best.dropout)
        model = problem.model()
        if self.sort is of_gpt:  # untied, so that the head is a group of its own
            head = model.get_submodule("head")
            head.weight = nn.Parameter(head.get_parameter("weight").detach().clone())
        groups = named_groups(model, self.sort)
        for group, factor in zip(groups, factors, strict=False):
            group["lr"] = lr * factor
        torch.manual_seed(seed)
        return problem, model, self.task.optimizer(groups, self.best)


CASES = (
    Case("tabular", of_layers, BEST["tabular"]),
    Case("digits_noise", of_layers, BEST["digits_noise"]),
    Case("denoise", of_layers, BEST["denoise"]),
    Case("text_small", of_gpt, BEST["text_small"]),
    Case("text_recurrent", of_layers, BEST["text_recurrent"]),
    Case("text_momentum", of_gpt, BEST["text_momentum"]),
    Case("text_muon", of_muon, Setting(0.016, 0.1)),
)
LARGER = (Case("text_large", of_gpt, BEST["text_large"]), Case("gpt_400k", of_gpt, BEST["gpt_400k"]))
"""By --tasks alone."""


def fixed(case: Case, seed: int, lr: float, factors: Sequence[float]) -> float:
    """The test loss of a plain run: warm-up and a straight line to 0."""
    task = case.task
    problem, model, optimizer = case.begin(seed, lr, factors)
    courses = [own_schedule(optimizer, task.steps, index) for index in range(len(optimizer.param_groups))]
    for step in range(task.steps):
        for group, course in zip(optimizer.param_groups, courses, strict=True):
            group["lr"] = course(step)
        problem.loss(model, problem.batch(step)).backward()
        update(task, optimizer)
    return problem.test_loss(model)


@dataclass(frozen=True)
class Explored:
    """What a run with hdet came to.

    Attributes:
        probed: example-passes of probes, as a share of those of training.
        factors: what each knob was moved by.
    """

    loss: float
    probed: float
    factors: dict[str, float]


def explored(
    case: Case, seed: int, factors: Sequence[float], by: Apart, steps: int, evidence: GroupLines | None = None
) -> Explored:
    """A run in which one factor, or one for each of several rates, is searched; without `evidence` by the recipe's."""
    task = case.task
    problem, model, optimizer = case.begin(seed, case.best.lr, factors)
    passes = 0

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal passes
        losses = problem.example_losses(model, batch)
        passes += len(losses) * (3 if torch.is_grad_enabled() else 1)
        return losses.mean()

    def batches(window: int) -> list[Any]:
        return parts(problem.probe(window), task.sub_batches)

    named: dict[Groups, str] = {None: ""}
    if by != "one":
        named = group_names(optimizer) if by == "groups" else kinds_of_optimizers(optimizer)
    courses = {groups: own_schedule(optimizer, steps, first_of(groups)) for groups in named}
    choices = choose(model, optimizer, steps, rates=courses, rate_names=named, exclude=EXCLUDED)
    knobs = [choice.knob for choice in choices if choice.knob is not None]
    if by != "one" and evidence is not None:
        knobs = [knob.replace(evidence=evidence) for knob in knobs]
    engine = hdet.Engine(
        hdet.micro_batches(model, optimizer, 1),
        knobs,
        window=hdet.windows.GrowingWindow(),
        signal=hdet.Probe(loss, batches),
        seed=seed,
        total_steps=steps,
        guard=hdet.Rewind(),
        tail=hdet.TailAverage(),
    )
    for step in range(steps):
        (replica,) = engine.replicas
        with replica:
            own = problem.loss(model, problem.batch(step))
            own.backward()
        engine.share_gradients()
        update(task, optimizer)
        engine.step(own.detach())
    learned = {name: one.factor or 1.0 for name, one in engine.learned.items()}
    return Explored(problem.test_loss(model), passes / (3 * task.batch * steps), learned)


def first_of(groups: Groups) -> int:
    """The number of the first of some parameter groups; of all, 0."""
    first = groups[0] if isinstance(groups, tuple) else groups
    return first if isinstance(first, int) else 0


TRIAL_SHARE, SMALLER, COMMON = 0.05, 4, 5
"""A trial's steps as a share of the run's, how many times smaller its batches are, and trials of the common rate."""


def by_trials(case: Case, seed: int, factors: Sequence[float]) -> tuple[list[float], float]:
    """Factors on the rates of groups from short trials before the run, and their compute as a share of the run's.

    Five trials find the best common rate for runs as short as that. About it each group's rate is sqrt(10) above or
    below in eight more, by the rows of the array. A group moves towards its better side, by sqrt(10) at most and by
    less where its effect is small beside what the trials scatter by in the columns that no group has. The geometric
    mean of the rates stays.
    """
    small = replace(case.task, batch=case.task.batch // SMALLER)
    problem = small.problem(seed, case.best.dropout)
    steps = round(TRIAL_SHARE * case.task.steps)
    course = LinearDecay(1.0, total_steps=steps, warmup=0.3)
    examples = 0

    def judged(model: nn.Module) -> tuple[float, ...] | None:
        nonlocal examples
        model.eval()
        held_out = [problem.probe(window) for window in range(4)]
        with torch.no_grad():
            each = torch.cat([problem.example_losses(model, batch) for batch in held_out])
        examples += len(each)
        losses = each.reshape(-1, small.sub_batches).mean(dim=0)
        return tuple(losses.tolist()) if bool(torch.isfinite(losses).all()) else None

    def trial(common: float, levels: Sequence[int]) -> Trial:
        _, model, optimizer = replace(case, of=small).begin(seed, common, factors)
        for group, level in zip(optimizer.param_groups, levels, strict=False):
            group["lr"] *= ROOT**level
        peaks = [group["lr"] for group in optimizer.param_groups]
        for step in range(steps):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * course(step)
            problem.loss(model, problem.batch(step)).backward()
            update(small, optimizer)
        return Trial(common, judged(model))

    before = Trial(0.0, judged(problem.model()))
    tried = [trial(case.best.lr, RIGHT)]
    while len(tried) < COMMON:
        tried.append(trial(next_rate(tried, before, 4.0), RIGHT))
    best = minimum(tried, before).rate
    groups = len(named_groups(problem.model(), case.sort))
    ends = np.array([min(trial(best, row).loss, before.loss) for row in PATTERNS])
    signs = np.array(PATTERNS, dtype=float)[:, :groups]
    halves = signs.T @ ends / len(ends)
    rest = ends - ends.mean() - signs @ halves
    error = np.sqrt(rest @ rest / (len(ends) - 1 - groups) / len(ends))
    moves = -np.sign(halves) * np.maximum(0.0, 1.0 - (error / halves) ** 2)
    spent = (examples + 3 * small.batch * steps * (COMMON + len(ends))) / (3 * case.task.batch * case.task.steps)
    return [float(ROOT**move) for move in moves - moves.mean()], spent


def print_trials(case: Case, seeds: Sequence[int], patterns: Sequence[int]) -> None:
    """One rate in the run, from the ratios given and from those that trials found; both in a plain run's compute."""
    print(f"\n{case.name}, {len(seeds)} seeds")
    print(f"{'pattern':20s} {'as given':>9s} {'by trials':>9s} {'spent':>7s}   ratios then (first seed)")
    for number in patterns:
        row = RIGHT if number < 0 else PATTERNS[number]
        factors = [ROOT**level for level in row]
        steps = affordable(case, "one")[0]
        given = [explored(case, seed, factors, "one", steps).loss for seed in seeds]
        ends, ratios, spent = [], [], 0.0
        for seed in seeds:
            moves, spent = by_trials(case, seed, factors)
            ratios.append([factor * move for factor, move in zip(factors, moves, strict=False)])
            ends.append(explored(case, seed, ratios[-1], "one", round(steps * (1.0 - spent))).loss)
        print(
            f"{' '.join(f'{level:+d}' for level in row):20s} {np.mean(given):9.4f} {np.mean(ends):9.4f} {spent:7.1%}   "
            f"{' '.join(f'{ratio:.2g}' for ratio in ratios[0])}",
            flush=True,
        )


def held(case: Case, seed: int, factors: Sequence[float]) -> tuple[float, dict[str, float | None]]:
    """A plain run's test loss, and how far each group's steps go beside the others' (`Estimate.step_ratio`)."""
    task = case.task
    problem, model, optimizer = case.begin(seed, case.best.lr, factors)
    names = [group["name"] for group in optimizer.param_groups]
    knobs = [
        hdet.LearningRate(
            groups=name,
            schedule=own_schedule(optimizer, task.steps, index),
            evidence=GroupLines(),
            controller=hdet.controllers.Hold(),
        )
        for index, name in enumerate(names)
    ]
    engine = hdet.Engine(
        hdet.micro_batches(model, optimizer, 1),
        knobs,
        window=hdet.windows.GrowingWindow(),
        signal=hdet.Probe(
            lambda model, batch: problem.example_losses(model, batch).mean(),
            lambda window: parts(problem.probe(window), task.sub_batches),
        ),
        seed=seed,
        total_steps=task.steps,
    )
    for step in range(task.steps):
        with engine.replicas[0]:
            own = problem.loss(model, problem.batch(step))
            own.backward()
        engine.share_gradients()
        update(task, optimizer)
        engine.step(own.detach())
    first = engine.history.windows[0].estimates
    ratios = {name: first[knob.name]["step_ratio"] for name, knob in zip(names, engine.knobs, strict=True)}
    return problem.test_loss(model), ratios


def print_worth(case: Case, seeds: Sequence[int]) -> None:
    """Of each group: what its rate alone three times off costs, and how far its steps go then beside the others'."""
    right = [held(case, seed, [1.0] * 5) for seed in seeds]
    at_right = np.mean([loss for loss, _ in right])
    print(f"\n{case.name}, {len(seeds)} seeds; right ratios {at_right:.4f}")
    print(f"{'group':20s} {'rate':>6s} {'loss':>8s} {'steps':>8s}")
    for index, name in enumerate(right[0][1]):
        for factor in (1 / ROOT, 1.0, ROOT):
            factors = [factor if k == index else 1.0 for k in range(5)]
            made = right if factor == 1.0 else [held(case, seed, factors) for seed in seeds]
            behind, ratios = np.mean([loss for loss, _ in made]) - at_right, [told[name] for _, told in made]
            known = [ratio for ratio in ratios if ratio is not None]
            told = f"{np.exp(np.mean(np.log(known))):.2f}x" if known else "-"
            print(f"{name:20s} {factor:6.2f} {behind:+8.3f} {told:>8s}", flush=True)


def cost(groups: int, layers: int = 30, width: int = 96, steps: int = 80) -> tuple[float, float, int]:
    """CPU seconds of a run, those at windows' ends, and the probe's passes, with a rate for so many groups of layers.

    With 0 groups one rate is searched as a single knob.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))
    passes = 0

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        nonlocal passes
        passes += 3 if torch.is_grad_enabled() else 1
        distance: Tensor = (model(batch) - batch).square().mean()
        return distance

    parts = [list(chunk) for chunk in np.array_split(np.arange(layers), max(groups, 1))]
    held = [{"name": str(k), "params": [p for i in own for p in model[i].parameters()]} for k, own in enumerate(parts)]
    optimizer = torch.optim.AdamW(held, lr=1e-3)
    probe = hdet.Probe(loss, [torch.randn(32, width) for _ in range(8)])
    names = [str(k) for k in range(groups)]
    courses: dict[Any, Schedule] = {name: own_schedule(optimizer, steps) for name in names}
    choices = choose(model, optimizer, steps, rates=courses or None, exclude=EXCLUDED)
    engine = hdet.Engine(
        hdet.micro_batches(model, optimizer, 1),
        [choice.knob for choice in choices if choice.knob is not None],
        window=hdet.windows.GrowingWindow(),
        signal=probe,
        total_steps=steps,
    )
    began, closing = time.process_time(), 0.0
    for _ in range(steps):
        inputs = torch.randn(256, width)
        with engine.replicas[0]:
            own = (model(inputs) - inputs).square().mean()
            own.backward()
        engine.share_gradients()
        optimizer.step()
        optimizer.zero_grad()
        before = time.process_time()
        if engine.step(own.detach()) is not None:
            closing += time.process_time() - before
    return time.process_time() - began, closing, passes


def print_costs() -> None:
    """The run and its windows' ends, beside one group and beside one knob; the better of two runs each."""
    print(f"{'rates':>12s} {'run, s':>8s} {'ends, s':>8s} {'passes':>7s}")
    for groups in (0, 1, 5, 30):
        runs = [cost(groups) for _ in range(2)]
        run, ends, passes = min(run[0] for run in runs), min(run[1] for run in runs), runs[0][2]
        print(f"{groups or 'one knob':>12} {run:8.2f} {ends:8.2f} {passes:7d}", flush=True)


def print_step_times(matrices: int = 50, rates: int = 8, steps: int = 300) -> None:
    """Median time of an optimizer's step of tiny matrices: one rate, a group for each, and these joined by rate.

    The matrices are so small that the time is the host's. The last column has the joining in it.
    """
    print(f"\n{matrices} matrices, ms a step   one group  a group each  joined to {rates}")
    kernels = {"a loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    for name, options in kernels.items():
        held = nn.ParameterList(nn.Parameter(torch.randn(8, 8)) for _ in range(matrices))
        for own in held:
            own.grad = torch.randn_like(own)
        whole, cut = (torch.optim.AdamW(held, lr=1e-3, **options) for _ in range(2))  # type: ignore[arg-type]
        split = SplitGroups(cut, by_matrix(held, cut))
        split.put_in()
        for place, part in enumerate(cut.param_groups):
            part["lr"] = 1e-3 * (1 + place % rates)
        times: dict[str, list[float]] = {"one": [], "each": [], "joined": []}
        for _ in range(steps):
            began = time.perf_counter()
            whole.step()
            times["one"].append(time.perf_counter() - began)
            began = time.perf_counter()
            cut.step()
            times["each"].append(time.perf_counter() - began)
            began = time.perf_counter()
            split.join()
            cut.step()
            split.part()
            times["joined"].append(time.perf_counter() - began)
        one, each, joined = (1e3 * float(np.median(own)) for own in times.values())
        print(f"{name:>24s} {one:11.2f} {each:13.2f} {joined:12.2f}", flush=True)


EXCLUDED = ("weight_decay", "dropout", "label_smoothing")


def parts(batch: Any, count: int) -> list[Any]:
    """A probe batch in sub-batches."""
    if isinstance(batch, tuple):
        return list(zip(*(torch.chunk(item, count) for item in batch), strict=True))
    return list(torch.chunk(batch, count))


@cache
def affordable(case: Case, by: Apart) -> tuple[int, float]:
    """Steps that, with their probes, cost what a plain run does; and the probes' share of training."""
    steps = case.task.steps
    probed = explored(case, 0, [1.0] * 5, by, steps).probed
    return round(steps / (1.0 + probed)), probed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tasks", nargs="+", choices=[case.name for case in CASES + LARGER], default=[case.name for case in CASES]
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--patterns", type=int, nargs="+", default=list(range(-1, 8)), help="-1 is the right ratios")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--again", type=float, nargs="*", help="shares of the run at which groups are compared again")
    instead.add_argument("--cost", action="store_true", help="measure what many groups cost")
    instead.add_argument("--trials", action="store_true", help="find ratios by short trials before the run")
    instead.add_argument("--worth", action="store_true", help="show what each ratio is worth, and how far steps go")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", "the probe is too small")
    torch.set_num_threads(1)
    if given.cost:
        print_costs()
        print_step_times()
        return
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    evidence = None if given.again is None else GroupLines(again=tuple(given.again))
    for case in (case for case in CASES + LARGER if case.name in given.tasks):
        if given.worth:
            print_worth(case, seeds)
        elif given.trials:
            print_trials(case, seeds, given.patterns)
        else:
            measure(case, seeds, given.patterns, evidence)


def measure(case: Case, seeds: Sequence[int], patterns: Sequence[int], evidence: GroupLines | None) -> None:
    """Print one task's table."""

    def mean(run: Callable[[int], float]) -> float:
        return float(np.mean([run(seed) for seed in seeds]))

    sweep = {
        factor: mean(lambda seed: fixed(case, seed, case.best.lr * factor, [1.0] * 5))  # noqa: B023
        for factor in (0.25, 0.5, 1.0, 2.0, 4.0)
    }
    oracle = min(sweep.values())
    swept = ", ".join(f"x{factor:g} {loss:.4f}" for factor, loss in sweep.items())
    print(f"\n{case.name}, {len(seeds)} seeds; oracle {oracle:.4f} of {swept}")
    apart: list[Apart] = ["one", "groups"]
    if isinstance(case.begin(0, 1.0, RIGHT)[2], hdet.ChainedOptimizer):
        apart.append("optimizers")
    print("probes' share of training: " + ", ".join(f"{by} {affordable(case, by)[1]:.1%}" for by in apart))
    print(f"{'pattern':20s} {'fixed':>10s} {' '.join(f'{by:>10s}' for by in apart)}   factors found (first seed)")
    for number in patterns:
        row = RIGHT if number < 0 else PATTERNS[number]
        factors = [ROOT**level for level in row]
        began = time.process_time()
        plain = sweep[1.0] if number < 0 else mean(lambda seed: fixed(case, seed, case.best.lr, factors))  # noqa: B023
        runs = {
            by: [explored(case, seed, factors, by, affordable(case, by)[0], evidence) for seed in seeds] for by in apart
        }
        behind = [plain - oracle, *(float(np.mean([run.loss for run in own])) - oracle for own in runs.values())]
        found = "; ".join(
            f"{by} {' '.join(f'{value:.2g}' for value in own[0].factors.values())}" for by, own in runs.items()
        )
        print(
            f"{' '.join(f'{level:+d}' for level in row):20s} {' '.join(f'{one:+10.4f}' for one in behind)}   "
            f"{found}   ({time.process_time() - began:.0f} s)",
            flush=True,
        )


if __name__ == "__main__":
    main()
