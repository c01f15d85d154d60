"""A search whose state is taken where its loop multiplies losses, counts its passes, or is in the middle of a step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from attach_parts import adamw, batch, loss_of, network, probe

import hdet
from hdet.errors import CheckpointError
from hdet.evidence.contrast import ContrastCollector

STEPS = 60


class Run:
    """A loop of two micro-batches a step, with a GradScaler or none, which can be saved and gone on with."""

    def __init__(self, scaled: bool = False, **options: Any) -> None:
        self.model = network()
        self.optimizer = adamw(self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=768.0, growth_interval=7, enabled=scaled)
        self.search = hdet.attach(self.model, self.optimizer, probe=probe(), total_steps=STEPS, quiet=True, **options)
        self.parts: list[Any] = [self.model, self.optimizer, self.scaler, self.search]

    def take(self, step: int, part: int) -> None:
        torch.manual_seed(2 * step + part)
        self.scaler.scale(self.search.loss(loss_of(self.model, batch(step, part))) / 2).backward()

    def train(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            for part in range(2):
                self.take(step, part)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()

    def state(self) -> list[Any]:
        return copy.deepcopy([part.state_dict() for part in self.parts])

    def resume(self, state: list[Any]) -> None:
        for part, own in zip(self.parts, copy.deepcopy(state), strict=True):
            part.load_state_dict(own)

    @property
    def readings(self) -> dict[int, Any]:
        """Of dropout, by window."""
        return {record.window: record.estimates["dropout"] for record in self.search.history}


def traces_of(run: Run) -> Any:
    return next(own.record for own in run.search.engine.cycle.collectors if isinstance(own, ContrastCollector))


@pytest.fixture(scope="module")
def straight() -> dict[bool, Run]:
    runs = {scaled: Run(scaled) for scaled in (False, True)}
    for run in runs.values():
        run.train(0, STEPS)
        assert any(reading["slope"] for reading in run.readings.values())
    return runs


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "GradScaler"])
@pytest.mark.parametrize("at", [1, 2, 13, 30])
def test_a_resume_is_the_same_run_whoever_multiplies_and_counts(
    scaled: bool, at: int, straight: dict[bool, Run], assert_same: Any
) -> None:
    saved, resumed = Run(scaled), Run(scaled)
    saved.train(0, at)
    resumed.resume(saved.state())
    resumed.train(at, STEPS)
    assert_same(resumed.model.state_dict(), straight[scaled].model.state_dict())
    assert resumed.search.shifts == straight[scaled].search.shifts
    told = straight[scaled].readings
    assert resumed.readings == {window: told[window] for window in resumed.readings}
    assert isinstance(resumed.search.engine.home.scaler, torch.amp.GradScaler) == scaled


@pytest.mark.parametrize(("scale", "missed"), [(None, True), (768.0, False), (1536.0, True)])
def test_passes_after_a_resume_with_another_scale_are_left_out(scale: float | None, missed: bool) -> None:
    """Else the gradients of a block would be divided by a number that nobody multiplied them by."""
    saved, resumed = Run(True), Run(scale is not None)
    saved.train(0, 5)
    state = saved.state()
    assert state[3]["loss_scale"] == 768.0
    state[2] = {**state[2], "scale": scale} if scale is not None else {}
    resumed.resume(state)
    seen: list[bool] = []
    passes = resumed.search._riding.passes
    resumed.optimizer.register_step_pre_hook(lambda *_: seen.append(passes.missed))
    resumed.train(5, 7)
    assert seen == [missed, False]
    assert isinstance(resumed.search.engine.home.scaler, torch.amp.GradScaler) == (scale is not None)


@pytest.mark.parametrize("at", [13, 30])
def test_a_step_under_way_is_made_anew_and_counts_once(at: int, straight: dict[bool, Run]) -> None:
    """Between two micro-batches: what the first one told is in the state, and it comes again."""
    saved, resumed = Run(), Run()
    saved.train(0, at)
    saved.take(at, 0)
    state = saved.state()
    assert state[3]["entered"] == 1
    resumed.resume(state)
    traces, other = traces_of(resumed), traces_of(straight[False])
    assert traces.rejected
    resumed.train(at, STEPS)
    assert not traces.rejected
    assert 0.0 < traces.weights.sum() < other.weights.sum()


@pytest.mark.parametrize("passes", [0.5, 1, 2])
def test_a_state_that_is_refused_in_the_middle_of_a_step_takes_nothing_from_it(
    passes: float, straight: dict[bool, Run], assert_same: Any
) -> None:
    """After a forward, a pass, or all passes."""
    run = Run()
    another = Run(exclude=["dropout"]).search.state_dict()

    def refused() -> None:
        with pytest.raises(CheckpointError, match="written with other knobs"):
            run.search.load_state_dict(copy.deepcopy(another))

    for step in range(STEPS):
        torch.manual_seed(2 * step)
        loss = run.search.loss(loss_of(run.model, batch(step, 0))) / 2
        if passes == 0.5 and step > 0:
            refused()
        loss.backward()
        if passes == 1 and step > 0:
            refused()
        run.take(step, 1)
        if passes == 2 and step > 0:
            refused()
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert_same(run.model.state_dict(), straight[False].model.state_dict())
    assert run.readings == straight[False].readings


def test_a_state_may_be_asked_for_between_forward_and_backward() -> None:
    run = Run(micro_batches=2)
    run.train(0, 5)
    loss = run.search.loss(loss_of(run.model, batch(5)))
    with torch.no_grad():
        before = copy.deepcopy(run.model.state_dict())
    run.search.state_dict()
    loss.backward()
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())


def test_a_loss_divided_by_what_is_there_and_not_by_the_usual_number_is_no_reading() -> None:
    """Every third step has one micro-batch of four, whose loss is divided by one: nobody knows which it was."""
    searches = []
    for divided in (True, False):
        model = network()
        optimizer = adamw(model)
        search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, quiet=True)
        for step in range(STEPS):
            count = 1 if step % 3 == 2 else 4
            torch.manual_seed(step)
            for part in range(count):
                loss = loss_of(model, batch(step, part))
                if divided:
                    search.loss(loss / count).backward()
                else:
                    (search.loss(loss) / count).backward()
            optimizer.step()
            optimizer.zero_grad()
        searches.append(search)
    means = [[sum(record.losses) / len(record.losses) for record in search.history] for search in searches]
    assert searches[0]._riding.losses.divided
    assert not searches[1]._riding.losses.divided
    assert means[0] == pytest.approx(means[1], rel=0.15)


class Scaled(torch.nn.Module):
    """Its logits are multiplied by a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()
        self.scale = 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scale * self.layers(inputs)  # type: ignore[no-any-return]


@pytest.mark.parametrize("stop", [20, 40])
def test_what_acts_in_evaluation_is_in_place_before_the_next_pass(stop: int) -> None:
    """A run of 40 steps that is over makes no other one, and is evaluated all the same."""
    parts: list[list[Any]] = []
    for _ in range(2):
        model = Scaled()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        knob = hdet.Scalar("scale", path="scale", schedule=0.5, bounds=(0.1, 10.0), effect="forward", biased=False)
        search = hdet.attach(
            model, optimizer, probe=probe(), total_steps=40, window=4, quiet=True, knobs=[knob], guard=None, tail=None
        )
        parts.append([model, optimizer, search])
    (model, optimizer, search), again = parts
    for step in range(stop):
        search.loss(loss_of(model, batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    for part, own in zip(again, (model, optimizer, search), strict=True):
        part.load_state_dict(copy.deepcopy(own.state_dict()))
    assert again[0].scale == model.scale != 1.0
    again[2].detach()
    search.detach()
    assert again[0].scale == model.scale


def test_between_steps_what_acts_in_evaluation_has_its_value_of_the_coming_step() -> None:
    model = Scaled()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    course = hdet.schedules.Cosine(1.0, total_steps=40)
    knob = hdet.Scalar("scale", path="scale", schedule=course, bounds=(1e-4, 5.0), effect="forward", biased=False)
    search = hdet.attach(
        model, optimizer, probe=probe(), total_steps=40, window=5, quiet=True, knobs=[knob], guard=None, tail=None
    )
    for step in range(9):  # of a warm-up of 12
        search.loss(loss_of(model, batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
        (bound,) = [own for own in search.engine.knobs if own.name == "scale"]
        assert model.scale == bound.base(step + 1) != bound.base(step)
