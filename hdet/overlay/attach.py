"""`hdet.attach`: the one line that a training loop needs."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.engine.admission import as_many_passes, counted, declared, listed, of_these, switched, trained
from hdet.engine.engine import Engine
from hdet.engine.guard import Guard
from hdet.engine.tail import Tail, possible
from hdet.errors import ConfigError
from hdet.history import History
from hdet.hparams import Knob, LearningRate, Schedule
from hdet.hparams.update import GroupKnob, Groups
from hdet.overlay.foretold import Foretold, of_timm
from hdet.overlay.lent_bindings import Lending
from hdet.overlay.rates import RATE, Rates
from hdet.overlay.riding import MOST_SKIPPED, Riding
from hdet.overlay.search import Search
from hdet.overlay.split_groups import (
    Patterns,
    SplitGroups,
    by_matrix,
    by_pattern,
    group_names,
    kinds_of_optimizers,
    matrices_by_default,
)
from hdet.overlay.surroundings import home
from hdet.overlay.told_schedule import Follower, Told, bare_optimizer
from hdet.overlay.told_schedule import rates as held_rates
from hdet.recipes.recommended import DEFAULT_GUARD, DEFAULT_TAIL, choose, describe, excluding, own_schedule
from hdet.record import WindowRecord
from hdet.replicas import Replicas, tensors
from hdet.replicas.chained_optimizer import chained
from hdet.replicas.distributed import fully_sharded
from hdet.replicas.parallel import world
from hdet.signals import Objective, Probe
from hdet.windows import GrowingWindow, Windows

OWN: Literal["own"] = "own"
FAR_ABOVE = 2.0
"""So many times the rate of its last step is that of a schedule which is left before its rate comes down."""
_searches: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Search]] = weakref.WeakKeyDictionary()


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    probe: Probe,
    total_steps: int | None = None,
    scheduler: Any = None,
    scheduler_every: int = 1,
    schedule: Schedule | Literal["own"] | None = OWN,
    rates: Literal["auto", "together", "groups", "matrices", "optimizers"] | Patterns = "auto",
    knobs: Sequence[Knob] = (),
    exclude: Sequence[str] = (),
    micro_batches: int | None = None,
    replicas: Replicas | None = None,
    objective: Objective | None = None,
    window: int | Windows | None = None,
    guard: Guard | None = DEFAULT_GUARD,
    tail: Tail | None = DEFAULT_TAIL,
    anchor: Literal["device", "host"] = "device",
    averages: Literal["device", "host"] = "device",
    stride: int | None = None,
    noise_scale: bool = False,
    warmup_steps: int | None = None,
    history: str | os.PathLike[str] | History | None = None,
    seed: int = 0,
    quiet: bool = False,
) -> Search:
    """Explore hyperparameters in a training loop that stays as it is.

    Four torch hooks do what `with replica:` and `engine.step` do in a loop written for `hdet.Engine`. The optimizer
    goes on holding what you or your scheduler put there: what hdet learned is multiplied in just before
    `optimizer.step()` and taken out just after it. Levels of dropout and other knobs of the forward pass are in force
    from a training pass to its optimizer step.

    Args:
        model: what the loop calls: wrapped in DistributedDataParallel or compiled, if it is.
        optimizer: what the loop steps. The rates it holds are the starting point.
        probe: held-out loss; 8 sub-batches, together about as large as one training batch.
        total_steps: the run's length in optimizer steps; needed where something is looked ahead at.
        scheduler: the torch scheduler that the loop steps, or timm's. A copy is simulated to know where it goes. Where
            the loop writes the rates itself, a function of the step that tells which: `scheduler(step)` is the rate, or
            a list of one for each parameter group, of the loop's `step`-th optimizer step, counted from 0 here.
        scheduler_every: optimizer steps between two steps of the scheduler (steps per epoch, for one that is stepped
            every epoch).
        schedule: without a scheduler, hdet's own: 30 % warm-up and a straight line to 0 around the rate found ("own"),
            or one of `hdet.schedules`; it drives the rate inside the step. `None` follows whatever is written into the
            optimizer, and never looks ahead.
        rates: "together", one factor for the rates of all parameter groups; "groups", one for each, whose steps
            come to go equally far beside the weights; or names with patterns on parameter names, as `{"head":
            "head.*", "norms": ("*norm*", "*bias")}`, by which the optimizer's groups are cut for each step where they
            have to be. Parameters that no pattern matches are called "others". "matrices" cuts them so that each
            matrix (or filter bank, or table) is a group by its own name. "optimizers" is one for each kind of
            optimizer in an `hdet.ChainedOptimizer`, by its class's name; of one kind all are together. By default it is
            "matrices" for SGD, Adam and AdamW with 2 to 300 matrices, whole in this process and not mostly frozen,
            where all groups were given one rate, as a number; "optimizers" for a chain; and "together" for the rest,
            and where the schedule is not known, or `replicas` or a learning rate in `knobs` or `exclude` is given.
        knobs: in place of the recipe's knob of the same name, or beside them.
        exclude: names of the recipe's knobs (or one name) that are left as they are: "learning_rate", "weight_decay",
            "dropout", "label_smoothing".
        micro_batches: passes of this process to an optimizer step. By default those of the first step are counted,
            and nothing is explored in it.
        replicas: instead of what is found: from `hdet.micro_batches` or `hdet.distribute`, of this model and optimizer.
        objective: the training loss and training batches, for evidence that evaluates them by itself.
        window: steps between two readings, or a rule for them; by default `hdet.windows.GrowingWindow()`.
        guard: goes back where training went wrong; `None` goes on whatever happens.
        tail: after the last step the model holds averaged weights, where the probe finds them better than the last;
            `None` leaves these.
        anchor, averages: where the window's first weights, and its averaged weights, are kept.
        stride: of averaged weights, take every stride-th step's; by default as many as leave at least 128 in a window.
        noise_scale: read the gradient noise scale off the micro-batches of each step, where they are at least 2, in one
            process (`search.noise_scale`, and each window's record).
        warmup_steps: in how many steps at least the recipe's learning rates come to their peak: a schedule or scheduler
            that warms up for much fewer is held below a straight line, since a rate that is too high is seen while it
            rises. By default 30 % of the run's steps, at most 300; 0, and a scheduler that has made steps already,
            leave the schedule as it is. A search that goes on has that of its checkpoint. Groups that have one rate
            together have the warm-up of the first.
        history: a path for one JSON line a window; `hdet.History(path)` for a run that may go on with an old file. Of
            several ranks the first one's is written, and no other's.
        seed: of what hdet draws: which levels a pass has, and the random numbers of passes that are compared.
        quiet: do not print what was chosen.

    Returns:
        The search: what was learned (`shifts`), the windows (`history`), and its own `state_dict` for a checkpoint.

    Raises:
        ConfigError: what was given cannot be; the message names it and the way out. A search that the optimizer had
            before may have ended then.

    >>> import torch, hdet
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> probe = hdet.Probe(lambda model, x: model(x).square().mean(1), [torch.randn(8, 2)])
    >>> search = hdet.attach(model, optimizer, probe=probe, total_steps=30, quiet=True)
    >>> for step in range(30):
    ...     loss = model(torch.randn(8, 2)).square().mean()
    ...     search.loss(loss).backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> search.finished, optimizer.param_groups[0]["lr"], sorted(search.shifts)
    (True, 0.001, ['dropout', 'learning_rate', 'weight_decay'])
    """
    if not isinstance(probe, Probe):
        raise ConfigError(f"probe must be an hdet.Probe, got {type(probe).__name__}")
    listed(knobs)
    declared("rates", rates, str, Mapping)
    switched(noise_scale=noise_scale)
    total_steps = None if total_steps is None else counted("total_steps", total_steps)
    micro_batches = None if micro_batches is None else counted("micro_batches", micro_batches)
    optimizer = _inner(optimizer)
    trained(optimizer)
    _refuse_scripted(model)
    declared("replicas", replicas, Replicas, type(None))
    tensors.reshard(model)  # a look at the model, as a trainer has before it trains, leaves it gathered
    if replicas is not None:
        of_these(replicas, model, optimizer)
        if not replicas.diverge:
            as_many_passes(replicas, micro_batches)
    _end_earlier(model, optimizer)
    exclude, apart = excluding(exclude), ""
    follower = _follower(optimizer, scheduler, scheduler_every, schedule, total_steps)
    length = total_steps if follower is not None else None
    # Of the user's own groups, before any is cut: a function may read these.
    forecast = follower.forecast(length, optimizer.param_groups, held_rates) if follower and length else []
    if rates == "auto":
        ours = replicas is None and LearningRate.kind not in exclude
        ours = ours and not any(isinstance(knob, LearningRate) for knob in knobs)
        foreseen = scheduler is not None or schedule is not None  # else steps of groups cannot be compared
        # Of a run that is resumed the forecast goes on beyond its end.
        own = forecast[: max(1, len(forecast) - (follower.first if follower else 0))]
        alike = all(len(set(row)) == 1 for row in own)
        if ours and foreseen and alike and matrices_by_default(model, optimizer):
            apart, rates = "matrix", "matrices"
        elif ours and foreseen and len(kinds_of_optimizers(optimizer)) > 1:
            apart, rates = "kind of optimizer", "optimizers"
        else:
            rates = "together"
    if warmup_steps is None and follower is not None and follower.under_way:
        warmup_steps = 0  # a training that is under way has had its warm-up
    with ExitStack() as undo:
        split = None
        if rates == "matrices" or isinstance(rates, Mapping):
            names = by_matrix if rates == "matrices" else partial(by_pattern, patterns=rates)
            split = SplitGroups(optimizer, names(model, optimizer))
            knobs = [split.follow(knob) for knob in knobs]
            undo.callback(split.take_out)
            split.put_in()
        else:
            undo.callback(_share_again, optimizer, _shared_rates(optimizer, rates, schedule))
        found = Rates(optimizer, follower, follower is None and schedule is not None, split, forecast)

        def course_of(groups: Groups) -> Schedule:
            group = _leading(found, groups)
            if found.driven:
                return schedule if isinstance(schedule, Schedule) else own_schedule(optimizer, total_steps, group)
            return Told(found.course(RATE), group, length)

        named = _groups(optimizer, rates, split)
        _refuse_in_place_of_all(knobs, named)
        everything = {groups: course_of(groups) for groups in named}
        choices = choose(
            model,
            optimizer,
            total_steps,
            objective=objective,
            rates=everything,
            rate_names=named,
            knobs=knobs,
            exclude=exclude,
            stride=stride,
            warmup_steps=warmup_steps,
            window=window,
            # A mesh whose sharded dimension is 1: the loop's gradients are those of all ranks, and no hook sees one's.
            unseen=replicas is None and world() > 1 and fully_sharded.used(model),
        )
        explored = [_relative(choice.knob, found, optimizer, model, course_of) for choice in choices if choice.knob]
        searched_rate = any(isinstance(knob, LearningRate) for knob in explored)
        if searched_rate:
            refuse_own_rate(optimizer)
        found.driven = found.driven and searched_rate
        tail = possible(tail, optimizer, total_steps)
        if not quiet:
            print(describe(choices, guard=guard, tail=tail))
            if apart and searched_rate:
                print(f'  each {apart} has a learning rate of its own; rates="together" keeps one')

        # Whichever engine is made, one record.
        kept = History.given(history)

        def build(seats: int, lending: Lending) -> Engine:
            place = replicas if replicas is not None else home(model, optimizer, seats)
            place.leave_to_loop()
            return Engine(
                place,
                explored,
                window=window if window is not None else GrowingWindow(),
                signal=probe,
                objective=objective,
                seed=seed,
                total_steps=total_steps,
                history=kept,
                guard=guard,
                tail=tail,
                anchor=anchor,
                averages=averages,
                # Until the first step has counted its passes there is one seat.
                noise_scale=noise_scale and (place.size > 1 or micro_batches is not None),
                bind=lending.bind,
            )

        seats = micro_batches if replicas is None else len(replicas.local)
        search = Search(Riding(model, optimizer, build, found, seats, given_place=replicas is not None))
        if split is not None:
            split.take_out()
        search.undo_when_detached(undo.pop_all().close)
    if not quiet and search.engine.home.is_leader:
        search.on_window(_say_ending)
        search.say_left = _say_left_off
    _searches[optimizer] = weakref.ref(search)
    return search


def _say_ending(record: WindowRecord) -> None:
    if record.ending:
        print(f"hdet {record.ending}")


def _say_left_off(search: Search) -> None:
    """A loop that ends long before its `total_steps` fails in nothing. One whose GradScaler skips is a little short."""
    made, total = search.engine.step_count, search.engine.total_steps
    if total is None or not 0 < made < (1 - MOST_SKIPPED) * total:
        return
    rates = [knob.schedule for knob in search.engine.knobs if isinstance(knob.spec, LearningRate)]
    if any(rate(made) > FAR_ABOVE * rate(total - 1) for rate in rates):
        print(
            f"hdet left off at step {made} of {total}, in mid-schedule; if training ends here, as by early stopping, "
            f"make the next run one of about {made} steps, so that the rate comes down"
        )


def searched(optimizer: Optimizer) -> bool:
    """Whether a search is attached to an optimizer."""
    reference = _searches.get(optimizer)
    search = reference() if reference is not None else None
    return search is not None and search.attached


def _inner(optimizer: Any) -> Optimizer:
    """The torch optimizer inside a trainer's wrapper.

    Raises:
        ConfigError: it is none, or several.
    """
    if type(optimizer).__module__.startswith("deepspeed."):
        raise ConfigError(
            f"DeepSpeed's {type(optimizer).__name__} keeps master weights apart from the model, in parts on each rank; "
            f"give the engine to hdet.deepspeed.attach(engine, probe=...)"
        )
    if type(optimizer).__module__.startswith("torchft."):
        raise ConfigError(
            "torchft steps this optimizer where its replica groups commit a step, and a search by hdet.attach is one "
            "group's own, which others would not follow; call hdet.torchft.attach(manager, model, optimizer, probe=...)"
        )
    optimizer = bare_optimizer(optimizer)
    if isinstance(optimizer, (list, tuple, dict)):
        raise ConfigError(
            "hdet.attach takes one optimizer, got several; where they step one model, make them one by "
            "hdet.ChainedOptimizer(first, second), and step that; else attach one search to each model"
        )
    if not isinstance(optimizer, Optimizer):
        inside = [name for name, own in getattr(optimizer, "__dict__", {}).items() if isinstance(own, Optimizer)]
        raise ConfigError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer)}"
            + "".join(f", which holds one: give hdet.attach its .{name}" for name in inside[:1])
        )
    for each, name in product(chained(optimizer), ("base_optimizer", "_base_optimizer")):
        if isinstance(getattr(each, name, None), Optimizer):
            raise ConfigError(
                f"{type(each).__name__} steps another optimizer, its {name}, which is where learning rate and decay "
                f"act: give that one to hdet.attach"
            )
    if any(kind.__name__ == "PostLocalSGDOptimizer" for each in chained(optimizer) for kind in type(each).__mro__):
        raise ConfigError(
            "PostLocalSGDOptimizer makes the ranks' weights their mean every few steps, and they come apart in "
            "between, while hdet.attach takes a model whose ranks step alike; use the optimizer inside it, without its "
            'hook, or a loop written for hdet.Engine(..., gradients="local"), which merges at each window\'s end'
        )
    refuse_own_steps(optimizer)
    return optimizer


def refuse_own_steps(optimizer: Optimizer) -> None:
    """Go on with an optimizer that steps once a gradient, by the learning rate.

    Raises:
        ConfigError: it looks at the loss many times in one step, or makes steps of a size of its own.
    """
    if any(isinstance(each, torch.optim.Rprop) for each in chained(optimizer)):
        raise ConfigError(
            "Rprop reads its learning rate in the first step alone and finds the size of every other by itself, so no "
            "rate found later would be in force; hdet explores optimizers that step by their rate, such as AdamW"
        )
    if any(isinstance(each, torch.optim.LBFGS) for each in chained(optimizer)):
        raise ConfigError(
            "L-BFGS looks at the loss many times in one step, along a line of its own, which no learning rate found in "
            "between would fit; hdet explores optimizers that step once a gradient, such as AdamW and SGD"
        )


def refuse_own_rate(optimizer: Optimizer) -> None:
    """Explore the learning rate of an optimizer that steps by it.

    Raises:
        ConfigError: it works its own out.
    """
    for each, group in [(own, group) for own in chained(optimizer) for group in own.param_groups]:
        if group.get("relative_step") is True and group.get("lr") is not None:
            raise ConfigError(
                f"{type(each).__name__} with relative_step=True steps by a rate of its own, whatever its groups hold "
                f"as lr, so no rate that is found would be in force; make it with relative_step=False and a rate, or "
                f"leave the rate to it: exclude=['learning_rate']"
            )


def _refuse_scripted(model: nn.Module) -> None:
    """Go on with a model that takes hooks.

    Raises:
        ConfigError: it does not, as a whole of TorchScript.
    """
    if isinstance(model, torch.jit._script.RecursiveScriptModule):
        raise ConfigError(
            "the model is one of torch.jit.script, or was loaded by torch.jit.load, and takes no hooks, by which hdet "
            "follows a loop; put it into a module, as nn.Sequential(model), and let the loop call that one and "
            "hdet.attach have it"
        )


def _end_earlier(model: nn.Module, optimizer: Optimizer) -> None:
    """A notebook's cell may run twice: the search of the first time ends, and one that is over goes.

    Raises:
        ConfigError: a search with another optimizer rides on this model.
    """
    for held, reference in list(_searches.items()):
        earlier = reference()
        if earlier is None or not earlier.attached:
            continue
        if held is optimizer or (earlier.model is model and earlier.finished):
            earlier.let_go()
        elif earlier.model is model:
            raise ConfigError(
                f"a search with another optimizer ({type(held).__name__}) is attached to this model, and each would "
                f"take the other's steps for the model's own; make them one optimizer by hdet.ChainedOptimizer, or "
                f"detach the other search first"
            )


def _shared_rates(optimizer: Optimizer, rates: Any, schedule: Any) -> list[Any]:
    """What each group holds as its rate, as the same tensor where several share it.

    Raises:
        ConfigError: the loop may write a tensor that groups share, and these are to have rates of their own.
    """
    held = [group["lr"] for group in optimizer.param_groups]
    ids = [id(rate) for rate in held if isinstance(rate, Tensor)]
    if len(set(ids)) < len(ids) and rates != "together" and schedule is None:
        raise ConfigError(
            "parameter groups share one tensor as their learning rate, and under rates= each has a rate of its own; "
            "give every group a tensor of its own, or let a torch scheduler (scheduler=) or hdet's schedule drive them"
        )
    return held


def _share_again(optimizer: Optimizer, held: list[Any]) -> None:
    """Groups that shared a tensor share it again."""
    for group, rate in zip(optimizer.param_groups, held, strict=False):
        if isinstance(rate, Tensor):
            group["lr"] = rate


def _follower(
    optimizer: Optimizer,
    scheduler: Any,
    scheduler_every: int,
    schedule: Schedule | Literal["own"] | None,
    total_steps: int | None,
) -> Follower | Foretold | None:
    every = counted("scheduler_every", scheduler_every)
    if scheduler is not None:
        if schedule != OWN:
            raise ConfigError(
                "give scheduler= or schedule=, not both: a scheduler is yours and writes the rates, a schedule "
                "is hdet's and drives them"
            )
        if total_steps is None:
            raise ConfigError("a scheduler is simulated to the run's end; give total_steps=, in optimizer steps")
        if of_timm(scheduler):
            return Foretold.by_timm(scheduler, optimizer, every)
        if callable(scheduler) and not isinstance(scheduler, (type, Schedule)):
            if every != 1:
                raise ConfigError("scheduler_every= is how often a scheduler is stepped; a function is given the step")
            return Foretold(scheduler, optimizer)
        return Follower(scheduler, optimizer, every)
    if every != 1:
        raise ConfigError(
            f"scheduler_every={every} says how often a scheduler is stepped, and none is given; give scheduler= with it"
        )
    if not (schedule is None or schedule == OWN or isinstance(schedule, Schedule)):
        raise ConfigError(
            f'schedule is an hdet.schedules.Schedule, "own" or None, got {schedule!r}; a torch scheduler is scheduler='
        )
    if schedule == OWN and any("initial_lr" in group for group in optimizer.param_groups):
        raise ConfigError(
            "a torch scheduler drives this optimizer (its groups hold 'initial_lr'), and hdet was not told of it; give "
            "scheduler=, or schedule=None to follow what it writes, or schedule=hdet.schedules.Cosine(...) to have "
            "hdet drive the rate instead"
        )
    return None


def _groups(optimizer: Optimizer, rates: Any, split: SplitGroups | None) -> dict[Groups, str]:
    """The groups that have a learning rate together, and what they are called.

    Raises:
        ConfigError: `rates` is none of what it can be.
    """
    if split is not None:
        return {tuple(indices): name for name, indices in split.indices.items()}
    if rates == "together":
        return {None: ""}
    if rates == "optimizers":
        return kinds_of_optimizers(optimizer)
    if rates != "groups":
        raise ConfigError(
            f'rates is "auto", "together", "groups", "matrices", "optimizers" or a mapping of names to patterns on '
            f"parameter names, got {rates!r}"
        )
    return group_names(optimizer)


def _refuse_in_place_of_all(knobs: Sequence[Knob], named: Mapping[Groups, str]) -> None:
    """Of rates that were asked for by name, a knob may take the place of one."""
    labels = [f"learning_rate[{name}]" for groups, name in named.items() if groups is not None]
    for knob in knobs:
        if labels and isinstance(knob, LearningRate) and knob.label not in labels:
            raise ConfigError(
                f"rates= asks for the learning rates {labels}, and the knob {knob.label!r} would take the place of all "
                f"of them; leave one of the two out, or give the knob name= one of these"
            )


def _leading(found: Rates, groups: Groups) -> int:
    """The user's group that a factor of several is measured at: the first with a rate above 0 for most of the run."""
    rows = found.course(RATE).forecast if found.follower is not None else [found.read(RATE)]
    chosen = range(len(rows[0])) if groups is None else (groups,) if isinstance(groups, int) else groups
    indices = [found.owner(index) for index in chosen if isinstance(index, int)]
    return max(indices, key=lambda index: sum(row[index] > 0.0 for row in rows))


def _relative(knob: Knob, found: Rates, optimizer: Optimizer, model: nn.Module, course_of: Any) -> Knob:
    """An update knob without a schedule of its own is relative to what the optimizer holds."""
    if not isinstance(knob, GroupKnob) or knob.schedule is not None:
        return knob
    indices = knob.bind(model, optimizer).indices
    if isinstance(knob, LearningRate):
        return knob.replace(schedule=course_of(indices))
    return knob.replace(schedule=Told(found.course((knob.key, knob.item)), found.owner(indices[0]), None))
