"""Contrast evidence beside DistributedDataParallel, which goes on averaging gradients in its backward: real ranks.

What every pass of every rank gave is compared with what a twin of the model gives on the same data, and estimates
with those of a plain model, whose gradients the engine shares after backward.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from launch import launch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from training import WIDTH, batch, difference, loss_of, told, weights

import hdet
from hdet.controllers import Hold
from hdet.errors import ConfigError, StepError
from hdet.evidence.contrast import ContrastCollector
from hdet.replicas.distributed import own_gradient
from hdet.replicas.distributed.exchange import Exchange
from hdet.replicas.distributed.own_gradient import OwnGradient

RANKS, BLOCKS = 2, 8
Found = dict[str, Any]


class Network(nn.Module):
    """If `spare`, with a parameter that a pass uses or not, as its data say, and one that nobody uses."""

    def __init__(self, spare: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, 32), nn.Tanh(), hdet.nn.Dropout(0.3), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 1)
        )
        self.sometimes = nn.Parameter(torch.ones(1)) if spare else None
        self.never = nn.Parameter(torch.ones(3, 2)) if spare else None

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.inner(inputs)
        used = self.sometimes is not None and float(inputs[0, 0]) > 0.0
        return found * self.sometimes if used else found


def ddp(hook: Any = None, state: Callable[[], Any] = lambda: None, **options: Any) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(model, **options)
        if hook is not None:
            wrapped.register_comm_hook(state(), hook)
        return wrapped

    return wrap


def low_rank() -> Any:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)


def builtin(model: nn.Module) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return wrapped


SMALL = {"bucket_cap_mb": 0.001}  # so that there are several, which are rebuilt after the first step
WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": ddp(),
    "buckets": ddp(**SMALL),
    "views": ddp(gradient_as_bucket_view=True, **SMALL),
    "static": ddp(static_graph=True),
    "fp16": ddp(default_hooks.fp16_compress_hook, **SMALL),
    "fp16 views": ddp(default_hooks.fp16_compress_hook, gradient_as_bucket_view=True),
    "builtin fp16": builtin,
    "PowerSGD": ddp(powerSGD_hook.powerSGD_hook, low_rank),
}
COMPRESSED = ("fp16", "fp16 views", "builtin fp16", "PowerSGD")


def engine_of(model: nn.Module, horizon: int = 0, **home: Any) -> hdet.Engine:
    """For two windows of as many blocks as an estimate needs; two replicas take two steps for a block."""
    window = BLOCKS * (2 if home.get("micro_batches") is None else 1)
    return hdet.Engine(
        hdet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.05), **home),
        [hdet.Dropout(evidence=hdet.evidence.Contrast(horizon=horizon, refresh=4), controller=Hold())],
        window=window,
        total_steps=2 * window,
        signal=hdet.Probe(loss_of, [batch(-1 - j, 99) for j in range(4)]),
    )


@contextmanager
def sent() -> Iterator[list[int]]:
    """How many tensors the engine averages by itself inside the block."""
    counts: list[int] = []

    def counted(self: Exchange, members: Any, valid: Any, *, known: Any = Exchange.mean_) -> None:
        counts.append(sum(len(own) for own in members))
        known(self, members, valid)

    with patch.object(Exchange, "mean_", counted):
        yield counts


def trained(engine: hdet.Engine, parts: int = 1, quiet: bool = False) -> Found:
    """Train, each pass beside its twin's; `parts` batches a pass, under DDP's `no_sync` but for the last if `quiet`."""
    (collector,) = engine.cycle.collectors
    assert isinstance(collector, ContrastCollector)
    seen: list[Tensor] = []
    add = collector.record.add

    def watched(replica: Any, gradient: Tensor, *rest: Any) -> None:
        seen.append(gradient.clone())
        add(replica, gradient, *rest)

    collector.record.add = watched  # type: ignore[method-assign]
    odd: list[float] = []
    exploring = 0
    with sent() as counts:
        assert engine.total_steps is not None
        for step in range(engine.total_steps):
            losses = []
            for replica in engine.replicas:
                exploring += collector.exploring
                with replica:
                    twin = copy.deepcopy(engine.hosts[0][0])
                    twin.zero_grad()
                    for own, model in ((False, twin), (True, replica.model)):
                        torch.manual_seed(97 * step + replica.index)
                        total = torch.zeros(())
                        for part in range(parts):
                            held = own and quiet and part + 1 < parts
                            with replica.model.no_sync() if held else nullcontext():  # type: ignore[operator]
                                loss = loss_of(model, batch(1000 * part + step, replica.index)) / parts
                                loss.backward()
                            total = total + loss.detach()
                losses.append(total)
                if collector.exploring:
                    want = [torch.zeros_like(p) if p.grad is None else p.grad for p in twin.parameters()]
                    rate = engine.optimizers[0].param_groups[0]["lr"] if collector.spec.horizon else 1.0
                    odd.append(float((seen[-1] - rate * torch.cat([w.flatten() for w in want])).abs().max()))
            engine.share_gradients()
            for optimizer in engine.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            engine.step(losses)
    return {
        "history": told(engine),
        "weights": weights(engine)[0],
        "odd": max(odd),
        "observed": len(seen),
        "exploring": exploring,
        "averaged by the engine": sum(counts),
    }


def everything() -> Found:
    torch.set_num_threads(1)
    found: Found = {name: trained(engine_of(wrap(Network()))) for name, wrap in WRAPS.items()}
    found["exact"] = trained(engine_of(ddp()(Network()), exact=True))
    for name in ("plain", "views", "fp16"):
        found[f"{name} horizon"] = trained(engine_of(WRAPS[name](Network()), horizon=20))
        found[f"{name} no_sync"] = trained(engine_of(WRAPS[name](Network())), parts=3, quiet=name != "plain")
    # Every pass of a step averages what has gathered: the first of them as well.
    found["ddp twice"] = trained(engine_of(ddp()(Network())), parts=3)
    for name in ("plain", "ddp", "views", "static", "fp16"):
        found[f"{name} micro"] = trained(engine_of(WRAPS[name](Network()), micro_batches=2))
    for name, options in {"ddp": {}, "views": {"gradient_as_bucket_view": True}}.items():
        wrap = ddp(find_unused_parameters=True, **options)
        found[f"{name} unused"] = trained(engine_of(wrap(Network(spare=True))))
        found[f"{name} unused micro"] = trained(engine_of(wrap(Network(spare=True)), micro_batches=2))
    found["plain unused"] = trained(engine_of(Network(spare=True)))
    found["plain unused micro"] = trained(engine_of(Network(spare=True), micro_batches=2))
    found["order"] = out_of_order()
    found["overlap"] = overlapped()
    try:
        engine_of(WRAPS["static"](Network()), exact=True)
        found["static exact"] = ""
    except ConfigError as error:
        found["static exact"] = str(error)
    return found


def overlapped() -> list[str]:
    """What happened in which order in the backward of a step that explores, after DDP has rebuilt its buckets."""
    events: list[str] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, which are strings here
        events.append("sent")
        return default_hooks.allreduce_hook(state, bucket)

    engine = engine_of(ddp(hook, **SMALL)(Network()))
    first = next(iter(engine.hosts[0][0].parameters()))
    first.register_hook(lambda gradient: events.append("first layer"))  # type: ignore[no-untyped-call]
    for step in range(3):
        events.clear()
        (replica,) = engine.replicas
        with replica:
            loss = loss_of(replica.model, batch(step, replica.index))
            loss.backward()
        engine.step([loss])
    return events


def out_of_order() -> dict[str, str]:
    """What is said where DDP has not averaged all micro-batches."""
    found = {}
    for name, order in {"reversed": (1, 0), "one": (0,), "again": (0, 1, 0, 1)}.items():
        engine = engine_of(ddp()(Network()), micro_batches=2)
        try:
            for number in order:
                with engine.replicas[number] as replica:
                    loss_of(replica.model, batch(0, replica.index)).backward()
            engine.share_gradients()
            found[name] = ""
        except StepError as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[Found]:
    return launch(everything, RANKS, limit=200.0)


def estimates(found: Found) -> list[Found]:
    return [record["estimates"]["dropout"] for record in found["history"]]


def same(found: Found, expected: Found, rel: float) -> None:
    """Estimates and weights agree, to `rel` of them."""
    assert len(estimates(found)) == 2
    for ours, theirs in zip(estimates(found), estimates(expected), strict=True):
        assert ours["t"] != 0.0
        for number in ("slope", "stderr"):
            assert ours[number] == pytest.approx(theirs[number], rel=rel)
    assert difference(found["weights"], expected["weights"]) <= rel


CASES = [
    *WRAPS,
    "exact",
    *(f"{name} {case}" for case in ("horizon", "no_sync") for name in ("plain", "views", "fp16")),
    "ddp twice",
    *(f"{name} micro" for name in ("ddp", "views", "static", "fp16")),
    *(f"{name} unused{case}" for name in ("plain", "ddp", "views") for case in ("", " micro")),
]


@pytest.mark.parametrize("case", CASES)
def test_what_is_observed_is_what_each_pass_gave(ranks: list[Found], case: str) -> None:
    """To the last bit, but where seats of a plain model add to one gradient and what one added is a difference."""
    for found in ranks:
        assert found[case]["observed"] == found[case]["exploring"] > 0
        assert found[case]["odd"] <= (1e-6 if case == "plain unused micro" else 0.0)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        *((name, "plain") for name in ("ddp", "buckets", "views", "static", "exact")),
        ("views horizon", "plain horizon"),
        ("views no_sync", "plain no_sync"),
        ("ddp twice", "plain no_sync"),
        *((f"{name} micro", "plain micro") for name in ("ddp", "views", "static")),
        *((f"{name} unused{case}", f"plain unused{case}") for name in ("ddp", "views") for case in ("", " micro")),
    ],
)
def test_estimates_are_those_of_gradients_the_engine_shares(ranks: list[Found], case: str, expected: str) -> None:
    for found in ranks:
        same(found[case], found[expected], rel=1e-4)


@pytest.mark.parametrize("case", ["ddp", "views"])
def test_with_two_ranks_they_are_so_bit_for_bit(ranks: list[Found], case: str) -> None:
    """The sum of two numbers does not depend on their order."""
    for found in ranks:
        assert found[case]["history"] == found["plain"]["history"]
        assert difference(found[case]["weights"], found["plain"]["weights"]) == 0.0


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        *((name, "plain") for name in COMPRESSED[:3]),
        *((f"fp16 {case}", f"plain {case}") for case in ("horizon", "no_sync", "micro")),
    ],
)
def test_a_communication_hook_changes_the_training_and_not_what_is_observed(
    ranks: list[Found], case: str, expected: str
) -> None:
    """Weights differ by what float16 rounds off, and estimates no more."""
    for found in ranks:
        same(found[case], found[expected], rel=0.02)
        assert difference(found[case]["weights"], found[expected]["weights"]) > 1e-7


def test_power_sgd_runs_beside_contrast(ranks: list[Found]) -> None:
    """It changes the training a lot; every rank still does the same."""
    for found in ranks:
        assert difference(found["PowerSGD"]["weights"], found["plain"]["weights"]) > 1e-4
        assert all(estimate["t"] != 0.0 for estimate in estimates(found["PowerSGD"]))


@pytest.mark.parametrize("case", CASES)
def test_ranks_decide_alike(ranks: list[Found], case: str) -> None:
    assert ranks[0][case]["history"] == ranks[1][case]["history"]
    assert difference(ranks[0][case]["weights"], ranks[1][case]["weights"]) == 0.0


@pytest.mark.parametrize("case", CASES)
def test_under_ddp_no_gradient_is_sent_a_second_time(ranks: list[Found], case: str) -> None:
    own = case.startswith("plain") or case == "exact"
    for found in ranks:
        assert (found[case]["averaged by the engine"] > 0) == own


def test_ddp_sends_gradients_while_backward_goes_on(ranks: list[Found]) -> None:
    for found in ranks:
        assert found["overlap"].index("sent") < found["overlap"].index("first layer")


def test_a_static_graph_that_never_averages_is_refused(ranks: list[Found]) -> None:
    for found in ranks:
        assert "DistributedDataParallel(static_graph=True) has to average" in found["static exact"]


def test_where_the_last_micro_batch_did_not_come_last_gradients_are_not_averaged_and_it_is_said(
    ranks: list[Found],
) -> None:
    for found in ranks:
        for name in ("reversed", "one"):
            assert "run engine.replicas in their order" in found["order"][name]
        assert found["order"]["again"] == ""


# -- by itself, in one process --------------------------------------------------------------------


class Mixed(nn.Module):
    """Parameters of several types and layouts, a sparse gradient, one that is frozen and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(5, 3, sparse=True)
        self.narrow = nn.Parameter(torch.randn(3).bfloat16())
        self.strided = nn.Parameter(torch.randn(4, 3).t())
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.none = nn.Parameter(torch.zeros(0))
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, rows: Tensor) -> Tensor:
        return ((self.table(rows) * self.narrow.float() + self.frozen) @ self.strided).square().sum()


def listened(own: OwnGradient, parameters: list[nn.Parameter], passes: Callable[[], object]) -> list[Tensor]:
    """What each parameter was seen to get in a block, dense and in float32, added up."""
    found = [torch.zeros(p.shape) for p in parameters]

    def take(numbers: Sequence[int], gradients: Sequence[Tensor]) -> None:
        for number, gradient in zip(numbers, gradients, strict=True):
            found[number] += gradient.to_dense() if gradient.layout != torch.strided else gradient

    with own.listening(parameters, take):
        passes()
    return found


@pytest.mark.parametrize("together", [1, 2**20])
def test_it_is_what_backward_adds(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handed over one by one, or together."""
    monkeypatch.setattr(own_gradient, "TOGETHER", together)
    model = Mixed()
    parameters = [p for p in model.parameters() if p.requires_grad and p.numel()]
    found = listened(OwnGradient(), parameters, lambda: model(torch.tensor([0, 2])).backward())
    for own, parameter in zip(found, parameters, strict=True):
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
        assert torch.equal(own, grad.float())


def test_several_backwards_in_a_pass_add_up_whatever_the_parameters_held_before() -> None:
    model = nn.Linear(3, 2)
    own, parameters = OwnGradient(), list(model.parameters())
    inputs = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    model(inputs[0]).square().sum().backward()

    def twice() -> None:
        model(inputs[1]).square().sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)  # as DDP does in averaging
        model(inputs[2]).square().sum().backward()

    found = listened(own, parameters, twice)
    alone = copy.deepcopy(model)
    alone.zero_grad()
    for one in inputs[1:3]:
        alone(one).square().sum().backward()
    assert all(torch.equal(one, p.grad) for one, p in zip(found, alone.parameters(), strict=True) if p.grad is not None)
    # The next pass begins anew.
    found = listened(own, parameters, lambda: model.weight.sum().backward())
    assert [one.sum().item() for one in found] == [6.0, 0.0]


def test_outside_the_block_nothing_is_heard_and_hooks_can_be_taken_off() -> None:
    model = nn.Linear(3, 2)
    own, parameters = OwnGradient(), list(model.parameters())
    found = listened(own, parameters, lambda: model(torch.ones(1, 3)).sum().backward())
    held = [one.clone() for one in found]
    model(torch.ones(1, 3)).square().sum().backward()
    assert all(torch.equal(one, kept) for one, kept in zip(found, held, strict=True))
    with pytest.raises(ZeroDivisionError):
        listened(own, parameters, lambda: 1 / 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pickle.loads(pickle.dumps(model))
    own.release()
    assert not any(p._backward_hooks for p in model.parameters())


def late(home: str) -> list[str]:
    """What is warned of where backward is called after the block, on the model wrapped so."""
    engine = engine_of(WRAPS[home](Network()))
    with warnings.catch_warnings(record=True) as told_of:
        warnings.simplefilter("always")
        for step in range(2):
            (replica,) = engine.replicas
            with replica:
                loss = loss_of(replica.model, batch(step, replica.index))
            loss.backward()  # type: ignore[no-untyped-call]
            engine.share_gradients()
            engine.optimizers[0].step()
            engine.optimizers[0].zero_grad()
            engine.step([loss.detach()])
    return [str(one.message) for one in told_of if "had no gradient" in str(one.message)]


def test_a_backward_that_ddp_hears_and_hdet_does_not_is_warned_of() -> None:
    for rank, found in enumerate(launch(late_everywhere, RANKS)):
        for home in ("ddp", "plain"):
            (message,) = found[home]
            assert f"in step 0, so Contrast learns nothing of replica {rank} " in message


def late_everywhere() -> dict[str, list[str]]:
    return {home: late(home) for home in ("ddp", "plain")}
