"""What a search holds beyond plain training, counted in a real run beside what `hdet.recipes.footprint` foretells.

    python benchmarks/footprint.py [--quick]

Models of 16 square matrices of float32 under AdamW; P is the bytes of the parameters that are trained. A row trains a
few windows with and without hdet and counts the storages of all tensors that are alive in mid-window. What the guard
and the tail keep lies in host memory where there is a device, and is counted apart, the tail's late in a run. "A
moment" is the most that is alive at a window's end above what stays. Then what is foretold of models that no memory
here would hold.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hdet
from hdet.recipes.footprint import Footprint, footprint
from hdet.recipes.recommended import choose

LAYERS = 16

WINDOWS, LATE = 4, 16
"""Of the 20 of a run, after how many is counted: before the tail has begun, and when all its means are there."""

SMALLEST = 4096
"""Bytes of the storages that are counted: a loss is none of them."""


def storages(tensors: list[Any]) -> dict[int, int]:
    """Bytes by storage."""
    found = {}
    for tensor in tensors:
        # (isinstance would ask proxies of torch for their class, which warn.)
        if issubclass(type(tensor), Tensor) and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            if storage.nbytes() >= SMALLEST:
                found[storage._cdata] = storage.nbytes()
    return found


def alive() -> int:
    gc.collect()
    return sum(storages(gc.get_objects()).values())


class Peak(TorchDispatchMode):
    """The most bytes of new storages alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = storages(tree_leaves((args, kwargs)))
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage.nbytes() >= SMALLEST and storage._cdata not in given:
                    self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.live = {key: (held, size) for key, (held, size) in self.live.items() if not held.expired()}
        self.most = max(self.most, self.total)
        return out

    @property
    def total(self) -> int:
        return sum(size for held, size in self.live.values() if not held.expired())


@dataclass
class Counted:
    """Bytes: beyond plain training in mid-window, of these the guard's and the tail's, and for a moment at a window's
    end."""

    held: int
    kept: int
    momentary: int


class Net(nn.Module):
    """Matrices, a dropout, and adapters of rank 8 if the matrices are frozen."""

    def __init__(self, side: int, frozen: bool) -> None:
        super().__init__()
        self.base = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(LAYERS)))
        self.dropout = nn.Dropout(0.1)
        self.down = nn.Linear(side, 8, bias=False) if frozen else None
        self.up = nn.Linear(8, side, bias=False) if frozen else None
        self.base.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.base(x))
        return out + self.up(self.down(x)) if self.up is not None and self.down is not None else out


def build(side: int, frozen: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net(side, frozen)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-4, foreach=False)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch).square().mean()
    return found


def plain(side: int, frozen: bool, steps: int) -> int:
    """Bytes that plain training holds."""
    before = alive()
    model, optimizer = build(side, frozen)
    for _ in range(steps):
        loss_of(model, torch.ones(2, side)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return alive() - before


def searched(side: int, frozen: bool, options: dict[str, Any], windows: int = WINDOWS, window: int = 8) -> Counted:
    """What a search holds after some windows, all but what plain training does."""
    base = plain(side, frozen, 2)
    before = alive()
    model, optimizer = build(side, frozen)
    probe = hdet.Probe(loss_of, [torch.ones(2, side), torch.ones(2, side) * 2])
    if "merge" in options:
        replicas = hdet.micro_batches(model, optimizer, 4)
        engine = hdet.Engine(replicas, signal=probe, total_steps=window * 20, window=window, **options)
    else:
        recipe = {"micro_batches": 4, "quiet": True, **options}
        engine = hdet.recommended(model, optimizer, total_steps=window * 20, window=window, probe=probe, **recipe)
    momentary = 0
    for step in range(windows * window + window // 2):
        losses = []
        for replica in engine.replicas:
            with replica:
                loss = loss_of(model, torch.ones(2, side) * (1 + replica.index))
                loss.backward()
            losses.append(loss.detach())
        engine.share_gradients()
        optimizer.step()
        optimizer.zero_grad()
        del loss
        if step == windows * window - 1:
            with Peak() as peak:
                engine.step(losses)
            momentary = peak.most - peak.total
        else:
            engine.step(losses)
    losses.clear()
    held = alive() - before - base
    watch: Any = engine.cycle.watch
    guard = [] if watch is None else [anchor for anchor in (watch.held, watch.first) if anchor is not None]
    kept: list[Any] = []
    for anchor in guard:
        kept += [*anchor._parameters.values(), *anchor._buffers.values()]
        kept += [value for state in anchor.optimizer_state()["state"].values() for value in state.values()]
    for part in engine.cycle.tail.parts if engine.cycle.tail is not None else ():
        kept += part.weights
    return Counted(held, sum(storages(kept).values()), momentary)


def foretold(side: int, frozen: bool, options: dict[str, Any]) -> Footprint:
    with torch.device("meta"):
        model, optimizer = build(side, frozen)
    if "merge" in options:
        return footprint(model, optimizer, guard=None, tail=None, **options)
    given = {name: options[name] for name in ("knobs", "exclude") if name in options}
    chosen = choose(model, optimizer, 160, stride=options.get("stride"), **given)
    knobs = [choice.knob for choice in chosen if choice.knob is not None]
    places = {name: options[name] for name in ("anchor", "averages") if name in options}
    return footprint(model, optimizer, knobs, **places)


ROWS: dict[str, tuple[bool, dict[str, Any]]] = {
    "recipe, no forward knob": (False, {"exclude": ["dropout"]}),
    "rates of groups, no forward knob": (
        False,
        {"exclude": ["dropout"], "knobs": (hdet.LearningRate(evidence=hdet.evidence.GroupLines()),)},
    ),
    "recipe": (False, {}),
    "recipe on LoRA adapters": (True, {}),
    "outer rate and momentum": (
        False,
        {"merge": hdet.merges.Outer(), "knobs": [hdet.merges.OuterLearningRate(), hdet.merges.OuterMomentum()]},
    ),
}


def decoder(width: int, layers: int, words: int) -> nn.Module:
    """The matrices of a decoder such as Llama's, in bfloat16, and a dropout."""
    inner = 8 * width // 3
    block = [(width, 3 * width), (width, width), (width, 2 * inner), (inner, width)]
    sizes = [(words, width), *(block * layers), (width, words)]
    matrices = nn.ModuleList(nn.Linear(*size, bias=False, dtype=torch.bfloat16) for size in sizes)
    return nn.ModuleDict({"matrices": matrices, "dropout": nn.Dropout(0.1)})


def large(layers: int, width: int) -> Footprint:
    with torch.device("meta"):
        model = decoder(width, layers, 32_000)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    knobs = [choice.knob for choice in choose(model, optimizer, 10_000) if choice.knob is not None]
    return footprint(model, optimizer, knobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the parameters")
    side = 128 if parser.parse_args().quick else 512
    torch.set_num_threads(1)
    print(f"{'counted, and as foretold':<33}{'P, MiB':>8}{'device':>16}{'host':>16}{'host, late':>16}{'a moment':>16}")
    for name, (frozen, options) in ROWS.items():
        counted, told = searched(side, frozen, options), foretold(side, frozen, options)
        p = told.parameters
        pairs = (
            (counted.held - counted.kept, told.bytes("device")),
            (counted.kept, told.bytes("host")),
            (searched(side, frozen, options, windows=LATE).kept, told.bytes("host", late=True)),
            (counted.momentary, told.momentary),
        )
        print(f"{name:<33}{p / 2**20:8.2f}" + "".join(f"{a / p:8.2f}{b / p:6.2f} P" for a, b in pairs), flush=True)
    for name, layers, width in (("7B", 32, 4096), ("70B", 80, 8192)):
        print(f"\n{name} in bfloat16, unsharded")
        print(large(layers, width))


if __name__ == "__main__":
    main()
