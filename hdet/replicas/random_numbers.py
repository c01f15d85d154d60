"""Random numbers that passes have in common, in one process as over ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from hdet.replicas.replica import Replica


class CommonNumbers:
    """What each pass draws its random numbers from: a seed worked out from the run's, the step and the pair.

    Nothing is communicated or saved, so that every process, and a resume, finds the same numbers. Torch's default
    generators are seeded inside the block only and are as they were after it. (Generators of Python and NumPy are left
    alone.) A replica that passes several times in a step draws other numbers each time; the n-th passes of the two of
    a pair have theirs in common. One that raises is not counted: it may be made again.

    Args:
        seed: of the run.
        models: of this process, by host; where their parameters lie is where they may draw.
    """

    def __init__(self, seed: int, models: Sequence[nn.Module]) -> None:
        self._seed = seed
        self._devices = [accelerators(model) for model in models]
        self._step = -1
        self._passes: dict[int, int] = {}

    @contextmanager
    def of(self, replica: Replica, step: int, *, together: bool) -> Iterator[None]:
        """The numbers of a replica's pass: its pair's where the two are compared, else its own."""
        if step != self._step:
            self._step, self._passes = step, {}
        number = self._passes.get(replica.index, 0)
        whose = f"pair:{replica.index // 2}" if together else f"replica:{replica.index}"
        text = f"{self._seed}:{step}:{whose}:{number}"
        with seeded(self._devices[replica.host], text):
            yield
        self._passes[replica.index] = number + 1


@contextmanager
def seeded(devices: Iterable[torch.device], text: str) -> Iterator[None]:
    """Torch's default generators, of the CPU and of some devices, are seeded by a text inside the block only."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"hdet.numbers").digest()
    generators = [torch.default_generator, *(_generator(device) for device in devices)]
    before = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def accelerators(model: nn.Module) -> list[torch.device]:
    """The devices other than the CPU on which a model's parameters lie."""
    return sorted({p.device for p in model.parameters() if p.device.type != "cpu"}, key=str)


def accelerators_in_use() -> list[torch.device]:
    """The accelerators that this process has begun to use; nothing waits for them."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or kind.type == "mps":
        return [] if kind is None else [kind]
    generators = getattr(torch.get_device_module(kind), "default_generators", ())
    return [torch.device(kind.type, number) for number in range(len(generators))]


def _generator(device: torch.device) -> torch.Generator:
    """A device's default generator."""
    module = torch.get_device_module(device)
    if device.type == "mps":
        generator: torch.Generator = module._get_default_mps_generator()
        return generator
    generator = module.default_generators[module.current_device() if device.index is None else device.index]
    return generator
