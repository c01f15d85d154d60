"""What a loop does wrong under a search is named the first time that it does it."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import attach_parts
import pytest
import torch
from attach_parts import adamw, attached, batch, loop, loss_of, network
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hdet
from hdet.errors import ConfigError, StepError


def test_a_model_that_is_not_the_one_attached_to_is_an_error() -> None:
    model = network()
    optimizer = adamw(model)
    attached(nn.Sequential(model), optimizer)
    with pytest.raises(StepError, match=r"call the Sequential that hdet\.attach was given, in train mode"):
        loop(model, optimizer)


def test_a_model_that_is_checkpointed_as_a_whole_needs_no_reentrance() -> None:
    """A reentrant checkpoint runs the model without gradients, and with them in backward alone."""
    model = network()
    optimizer = adamw(model)
    search = attached(model, optimizer, total_steps=4)
    for step, reentrant in ((0, False), (1, False), (2, True)):
        inputs, labels = batch(step)
        logits: Tensor = checkpoint(model, inputs.requires_grad_(), use_reentrant=reentrant)
        search.loss(F.cross_entropy(logits, labels)).backward()
        if reentrant:
            with pytest.raises(StepError, match=r"inside torch\.utils\.checkpoint, give that use_reentrant=False"):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
    assert search.engine.step_count == 2


def test_a_scheduler_nobody_spoke_of_is_an_error() -> None:
    model = network()
    optimizer = adamw(model)
    search = attached(model, optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    search.loss(loss_of(model, batch(0))).backward()
    optimizer.step()
    scheduler.step()
    with pytest.raises(StepError, match=r"give hdet\.attach scheduler="):
        model(batch(1)[0])
    search.detach()
    with pytest.raises(ConfigError, match="'initial_lr'"):
        attached(model, optimizer)


def test_a_rate_moved_beside_the_scheduler_is_an_error() -> None:
    model = network()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    search = attached(model, optimizer, scheduler=scheduler)
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(StepError, match=r"ExponentialLR would have put .* something else writes them too"):
        search.loss(loss_of(model, batch(0)))


def test_a_scheduler_that_goes_by_a_trainers_clock_is_an_error() -> None:
    model = network()
    optimizer = adamw(model)
    clock = [0]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + clock[0]))
    search = attached(model, optimizer, scheduler=scheduler)
    search.loss(loss_of(model, batch(0))).backward()
    optimizer.step()
    clock[0] += 1
    scheduler.step()
    with pytest.raises(StepError, match=r"LambdaLR would have put .* or it goes by more than its own count of steps"):
        model(batch(1)[0])


@pytest.mark.parametrize("shared", [False, True])
def test_a_metric_scheduler_and_a_foreign_one_are_refused(shared: bool) -> None:
    model = network()
    optimizer = adamw(model)
    if shared:
        scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(adamw(network()), 0.9)
    else:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    said = "the scheduler belongs to another optimizer" if shared else "ReduceLROnPlateau waits for a metric"
    with pytest.raises(ConfigError, match=said):
        attached(model, optimizer, scheduler=scheduler)


@pytest.mark.parametrize("replaced", ["layer", "parameter"])
def test_what_is_replaced_under_way_is_named(replaced: str) -> None:
    """Also where the optimizer trains the new parameters, as of points that are added to others."""
    model = network()
    optimizer = adamw(model)
    search = attached(model, optimizer)
    old = list(model.parameters())
    if replaced == "layer":
        model[0] = copy.deepcopy(model[0])
    else:
        model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    new = {id(one): other for one, other in zip(old, model.parameters(), strict=True)}
    for group in optimizer.param_groups:
        group["params"][:] = [new[id(parameter)] for parameter in group["params"]]
    gone = sum(one is not other for one, other in zip(old, model.parameters(), strict=True))
    with pytest.raises(StepError, match=f"^{gone} of the parameters that were trained .* are the model's no more"):
        loop(model, optimizer, search=search)


@pytest.mark.parametrize("explored", ["all, in many matrices", "learning_rate", "dropout"])
def test_a_parameter_that_grows_under_way_is_named(explored: str) -> None:
    """As a table whose rows become more: `parameter.data` is another tensor in the same parameter."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kinds = {"weight_decay", "learning_rate", "dropout"}
    exclude = [] if explored.startswith("all") else sorted(kinds - {explored})
    search = attached(model, optimizer, exclude=exclude)
    loop(model, optimizer, search=search, stop=7)
    model[3].weight.data = torch.zeros(4, 16)
    model[3].bias.data = torch.zeros(4)
    with pytest.raises(StepError, match=r"^2 of the parameters that were trained .* one of another size"):
        loop(model, optimizer, search=search, start=7)


def test_layers_that_the_optimizer_does_not_train_are_named() -> None:
    """All of them were replaced, and so none that the optimizer holds has a gradient."""
    model = network()
    optimizer = adamw(model)
    search = attached(model, optimizer)
    for place in (0, 3):
        model[place] = copy.deepcopy(model[place])
    with pytest.warns(UserWarning, match=r"give the optimizer the parameters that the model has now"):
        loop(model, optimizer, search=search, stop=2)


def test_several_optimizers_and_line_searches_are_refused() -> None:
    model = network()
    with pytest.raises(ConfigError, match="one optimizer, got several"):
        attached(model, [adamw(model)])
    with pytest.raises(ConfigError, match="L-BFGS looks at the loss many times in one step"):
        attached(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ConfigError, match="Rprop reads its learning rate in the first step alone"):
        attached(model, torch.optim.Rprop(model.parameters()))
    relative = torch.optim.SGD([{"params": list(model.parameters()), "relative_step": True}], lr=0.1)
    with pytest.raises(
        ConfigError, match="SGD with relative_step=True steps by a rate of its own, whatever its groups"
    ):
        attached(model, relative)
    attached(model, relative, exclude=["learning_rate"]).detach()
    first = attached(model, adamw(model))
    with pytest.raises(ConfigError, match=r"a search with another optimizer \(AdamW\) is attached to this model"):
        attached(model, torch.optim.SGD(model.parameters(), lr=0.1))
    first.engine.finish()
    second = attached(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert (first.attached, second.attached) == (False, True)
    second.detach()


class Adapting(torch.optim.Optimizer):
    """It finds its rate by itself, and keeps it in its groups."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] *= 1.1
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad)


def test_a_rate_that_is_written_within_a_step_is_an_error() -> None:
    """It would be taken out with what hdet had put in. Left to the optimizer, the loop is what it was."""
    found = []
    for searched in (True, False):
        model = network()
        optimizer = Adapting(model.parameters(), lr=0.01)
        if searched:
            search = attached(model, optimizer, schedule=None)
            with pytest.raises(
                StepError,
                match=r"lr of group 0 was written within a step of the Adapting .* by it or by a hook, and hdet would",
            ):
                loop(model, optimizer, search=search)
            search.detach()
        model.load_state_dict(network().state_dict())
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        left = ["learning_rate", "dropout"]
        search = attached(model, optimizer, schedule=None, exclude=left, guard=None, tail=None) if searched else None
        with torch.random.fork_rng():
            torch.manual_seed(0)
            loop(model, optimizer, search=search)
        found.append([*map(torch.clone, model.state_dict().values()), optimizer.param_groups[0]["lr"]])
    for one, other in zip(*found, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


class Twice(torch.optim.SGD):
    """Looks at the loss twice a step."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


def test_a_closure_called_twice_is_an_error() -> None:
    model = network()
    optimizer = Twice(model.parameters(), lr=0.1)
    attached(model, optimizer)

    def closure() -> Tensor:
        loss = loss_of(model, batch(0))
        loss.backward()
        return loss

    with pytest.raises(StepError, match=r"closure twice in one step.*, as SAM does, give hdet.attach that one"):
        optimizer.step(closure)


class Deaf(torch.optim.Optimizer):
    """It leaves the closure that its step is given."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])


def test_a_closure_that_is_not_called_is_told() -> None:
    model = network()
    optimizer = Deaf(model.parameters(), {"lr": 0.1})
    search = attached(model, optimizer)
    loss = search.loss(loss_of(model, batch(0)))
    loss.backward()
    with pytest.warns(UserWarning, match="the Deaf did not call the closure"):
        optimizer.step(lambda: loss)
    assert search.engine.step_count == 0


def test_a_dropout_that_something_else_writes_is_an_error() -> None:
    model = network()
    optimizer = adamw(model)
    search = attached(model, optimizer)
    plain_step = loss_of(model, batch(0))
    search.loss(plain_step).backward()
    optimizer.step()
    model[2].p = 0.5
    with pytest.raises(StepError, match=r"something else writes what hdet explores.*exclude=\('dropout',\)"):
        model(batch(1)[0])


@pytest.mark.parametrize("parts", [1, 2])
def test_where_a_written_dropout_is_put_back_the_search_goes_on(parts: int) -> None:
    """The second layer's, with the first one's value already in force, in a step's first pass and in a later one."""
    model = nn.Sequential(nn.Dropout(0.1), *network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    knobs = [hdet.Dropout(pattern=each, name=f"dropout {each}") for each in "03"]
    search = attached(model, optimizer, knobs=knobs, exclude=["dropout"], micro_batches=parts)
    loop(model, optimizer, search=search, stop=7, parts=lambda step: parts)
    for part in range(parts - 1):
        search.loss(loss_of(model, batch(7, part))).backward()
    model[3].p = 0.5
    with pytest.raises(StepError, match="something else writes what hdet explores"):
        model(batch(7, parts)[0])
    assert (model[0].p, model[3].p) == (0.1, 0.5)
    model[3].p = 0.2
    search.loss(loss_of(model, batch(7, parts))).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert search.engine.step_count == 8
    loop(model, optimizer, search=search, start=8, parts=lambda step: parts)
    assert search.finished


def test_no_loss_is_said_once_and_at_the_users_line() -> None:
    model = network()
    optimizer = adamw(model)
    attached(model, optimizer)
    with pytest.warns(UserWarning, match="hdet was told no training loss") as caught:
        loop(model, optimizer)
    assert [warning.filename for warning in caught] == [attach_parts.__file__]


def test_a_loss_on_another_scale_is_said() -> None:
    model = network()
    optimizer = adamw(model)
    search = attached(model, optimizer)
    search.loss(8 * loss_of(model, batch(0))).backward()
    with pytest.warns(UserWarning, match="different scales"):
        optimizer.step()


@pytest.mark.parametrize("reported", ["mean", "divided"])
def test_losses_divided_before_they_are_reported_are_found_out(reported: str) -> None:
    model = network()
    optimizer = adamw(model)
    search = attached(model, optimizer, micro_batches=4)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(5):
            for part in range(4):
                loss = loss_of(model, batch(step, part))
                losses.append(float(loss.detach()))
                if reported == "mean":
                    (search.loss(loss) / 4).backward()
                else:
                    search.loss(loss / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
    [record] = search.history
    assert record.loss == pytest.approx(sum(losses) / len(losses))


def test_gradients_divided_twice_are_said() -> None:
    model = network()
    optimizer = adamw(model)
    search = attached(model, optimizer)
    for part in range(4):
        (search.loss(loss_of(model, batch(0, part)) / 4) / 4).backward()
    with pytest.warns(UserWarning, match="are divided by 4 .*so that the gradient is"):
        optimizer.step()


def test_a_run_that_is_over_is_an_error_where_hdet_drives_the_rate() -> None:
    model = network()
    optimizer = adamw(model)
    search = attached(model, optimizer)
    loop(model, optimizer, search=search)
    with pytest.raises(StepError, match=r"the run is over after .* and with it the schedule"):
        loop(model, optimizer, search=search)


@pytest.mark.parametrize(
    "clears", ["never", "to None", "to zero", "through data", "in a hook", "after two", "in some steps"]
)
def test_gradients_that_are_never_cleared_are_told_once(clears: str) -> None:
    """Those of an accumulation are, in the end, and zeros may be written where torch does not see it."""
    model = network()
    optimizer = adamw(model)
    if clears == "in a hook":
        for parameter in model.parameters():
            parameter.register_hook(partial(cleared_before, parameter))
    search = attached(model, optimizer, exclude=["dropout"])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(12):
            for part in range(1 + (clears == "after two")):
                search.loss(loss_of(model, batch(step, part))).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if clears == "through data":
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.data.zero_()
            elif clears not in ("never", "in a hook") and (clears != "in some steps" or step % 5 == 0):
                optimizer.zero_grad(set_to_none=clears != "to zero")
    said = [str(one.message) for one in told]
    assert len(said) == (clears == "never")
    assert all(one.startswith("the gradients of 5 optimizer steps on end were not cleared") for one in said)


def cleared_before(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.zero_()


def test_gradients_that_are_kept_later_are_not_looked_at() -> None:
    model = network()
    optimizer = adamw(model)
    search = attached(model, optimizer, exclude=["dropout"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(30):
            search.loss(loss_of(model, batch(step))).backward()
            optimizer.step()
            if step < 17:
                optimizer.zero_grad(set_to_none=False)


def test_gradients_that_another_backward_of_the_step_keeps_are_its_own() -> None:
    """They are cleared before the first of the three, or before the second."""
    for place in (0, 1):
        model = network()
        optimizer = adamw(model)
        search = attached(model, optimizer, exclude=["dropout"])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(10):
                for part in range(3):
                    if part == place:
                        optimizer.zero_grad(set_to_none=False)
                    search.loss(loss_of(model, batch(step, part))).backward()
                optimizer.step()
        search.detach()


def test_where_warnings_are_errors_the_step_whose_gradients_are_kept_is_made() -> None:
    model = network()
    optimizer = adamw(model)
    search = attached(model, optimizer, exclude=["dropout"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6):
            search.loss(loss_of(model, batch(step))).backward()
            if step < 5:
                optimizer.step()
        with pytest.raises(UserWarning, match="steps on end were not cleared"):
            optimizer.step()
