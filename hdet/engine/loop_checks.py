"""Whether the training loop did in a step what the engine relies on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel

from hdet.errors import StepError
from hdet.hparams.binding import Attribute, Binding, Holding, ModelBinding
from hdet.hparams.bound_knob import BoundKnob
from hdet.nn import KnobTensor
from hdet.replicas import Replica, Replicas
from hdet.replicas.distributed import refusals
from hdet.user_warning import warn

UNTOLD = 10
"""Steps that a loop makes on end without `engine.step`, after which this is said."""


class LoopChecks:
    """Notes which replicas' passes were seen in a step, and that the optimizers hold what they held.

    Args:
        replicas: whose optimizers hold from now on the parameter groups that they hold now.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._passed: set[int] = set()
        self._first = None if replicas.left_to_loop or not replicas.local else replicas.local[0]
        called = replicas.local[0].model if replicas.local else None
        self._wrapped = called if isinstance(called, DistributedDataParallel) else None
        self._watched = next((p for p in replicas.hosts[0][0].parameters() if p.requires_grad), None)
        self._lost: set[str] = set()  # names of knobs of which it was said that their modules are gone
        self._version, self._untold = -1, -1  # the first change is that of a step that was told, or of none
        self._groups = [[len(group["params"]) for group in own.param_groups] for _, own in replicas.hosts]
        self._look()

    def _look(self) -> None:
        """Know by which objects to tell that nothing has changed."""
        self._held: list[Holding] = []
        self._lengths: list[tuple[list[Any], int]] = []
        for _, optimizer in self._replicas.hosts:
            groups, own = optimizer.param_groups, vars(optimizer)
            attribute = "param_groups" in own  # and no property
            self._held += [Holding(own, "param_groups", groups)] if attribute else []
            self._lengths.append((groups, len(groups) if attribute else -1))
            for index, group in enumerate(groups):
                self._held += [Holding(groups, index, group), Holding(group, "params", group["params"])]
                self._lengths.append((group["params"], len(group["params"])))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_held": [], "_lengths": [([], -1)]}  # a copy holds its own objects

    def entered(self, replica: Replica) -> None:
        """A replica's block is entered: says so once where the weights keep changing and no step is told."""
        if replica is not self._first or self._watched is None or self._watched._version == self._version:
            return
        self._version = self._watched._version
        self._untold += 1
        if self._untold == UNTOLD:
            warn(
                f"the weights have changed {UNTOLD} times between passes, and engine.step was not called in between: "
                f"nothing is explored, and every knob stays where it began; call engine.step(losses) after each "
                f"optimizer step"
            )

    def told(self) -> None:
        """The loop calls `engine.step`.

        Raises:
            StepError: it lets ranks make different numbers of steps.
        """
        self._untold = -1
        if self._wrapped is not None:
            refusals.joined(self._wrapped)

    def passed(self, replica: Replica) -> None:
        """A replica's block was left without an error."""
        self._passed.add(replica.index)

    def missed(self, step: int, reason: str, *, complete: bool) -> list[Replica]:
        """The replicas of this process that had no block in this step, where there is a reason to need it.

        Args:
            complete: whether every one was to have it.

        Raises:
            StepError: some had none.
        """
        missing = [replica for replica in self._replicas.local if replica.index not in self._passed]
        if missing and complete:
            named = ", ".join(str(replica.index) for replica in missing)
            raise StepError(
                f"{len(self._passed)} of {len(self._replicas.local)} replicas ran inside `with replica:` in step "
                f"{step} (not {named}), and {reason}; run forward and backward of each of engine.replicas inside "
                f"`with replica:`, in every step, or say engine.step(losses, complete=False) where an accumulation is "
                f"short; under hdet.attach, call the model itself and no part of it"
            )
        return missing

    def begin_step(self) -> None:
        """The next step's passes are noted from here on."""
        self._passed.clear()

    def same_modules(self, knobs: Sequence[BoundKnob]) -> None:
        """A window has closed: say it, once a knob, where what a knob writes is no part of the model any more."""
        there: set[int] = set()
        for knob in knobs:
            cells = [] if knob.name in self._lost else model_cells(knob.bindings)
            if not cells:
                continue
            modules = [module for model, _ in self._replicas.hosts for module in model.modules()]
            there = there or {id(held) for module in modules for held in (module, *vars(module).values())}
            lost = [cell for cell in cells if id(cell.module if isinstance(cell, Attribute) else cell) not in there]
            if lost:
                self._lost.add(knob.name)
                warn(
                    f"{len(lost)} of {len(cells)} places that {knob.name} is written to are no part of the model any "
                    f"more, as where a module was replaced: nothing drives the new one, and what is learned of "
                    f"{knob.name} is not of it; replace modules before hdet is attached, or the engine made (said once)"
                )

    def same_groups(self, step: int) -> bool:
        """Whether the optimizers hold the very groups that they held, and not others like them.

        Parameter groups are told apart by their number, over replicas and over time: none may come or change.

        Raises:
            StepError: an optimizer holds other groups than when the engine was made.
        """
        for listed, length in self._lengths:
            if len(listed) != length:
                break
        else:
            for owner, key, value in self._held:
                if owner[key] is not value:
                    break
            else:
                return True
        for (_, optimizer), then in zip(self._replicas.hosts, self._groups, strict=True):
            now = [len(group["params"]) for group in optimizer.param_groups]
            if now != then:
                raise StepError(
                    f"an optimizer holds other parameter groups in step {step} than when the engine was made: "
                    f"{now} parameters in its groups instead of {then}. Knobs, anchors and merges go by the number of "
                    f"a group. Make the engine after the last add_param_group, or give the optimizer all parameters "
                    f"from the start and train some later: parameter.requires_grad_(False)"
                )
        self._look()
        return False


def model_cells(bindings: Sequence[Binding]) -> list[KnobTensor | Attribute]:
    """The scalars inside models that a knob's bindings write; of those that write elsewhere none."""
    lent = [getattr(binding, "inner", binding) for binding in bindings]  # on a loop of the user's own
    return [cell for binding in lent if isinstance(binding, ModelBinding) for cell in binding.cells]


class PlainDropouts:
    """Notices in the first pass that the loop runs a compiled model whose plain dropouts knobs write.

    A model that is compiled when the engine is made is refused then. What `torch.compile(model)` returns leaves no mark
    on the model.
    """

    def __init__(self, knobs: Sequence[BoundKnob]) -> None:
        cells = [cell for knob in knobs if knob.spec.spread.width for cell in model_cells(knob.bindings)]
        self._modules = [
            cell.module for cell in cells if isinstance(cell, Attribute) and isinstance(cell.module, _DropoutNd)
        ]
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._compiled: list[bool] = []

    @property
    def are_there(self) -> bool:
        """Whether there is anything to notice."""
        return bool(self._modules)

    def begin(self) -> None:
        """The first pass begins, or does so again after one that failed."""
        if self._hooks:
            return
        compiled = self._compiled

        def look(*_: object) -> None:
            if torch.compiler.is_compiling():
                compiled.append(True)

        self._hooks = [module.register_forward_pre_hook(look) for module in self._modules]

    def end(self) -> None:
        """The first pass is over.

        Raises:
            StepError: it was compiled.
        """
        for hook in self._hooks:
            hook.remove()
        self._modules, self._hooks = [], []
        if self._compiled:
            raise StepError(
                "the loop runs what torch.compile made of the model, and its dropouts are plain nn.Dropout, which "
                "would recompile at every new rate; call hdet.nn.swap(model) before torch.compile, and before "
                "hdet.attach or the engine"
            )
