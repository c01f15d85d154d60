"""The warm noisy start: replicas set out from one checkpoint, each with a little noise of its own."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any, Literal
from zipfile import is_zipfile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

from hdet.errors import ConfigError
from hdet.files import damaged_part
from hdet.replicas import Replicas, tensors
from hdet.replicas.parallel import unwrapped

Checkpoint = str | os.PathLike[str] | Mapping[str, Any]

NOISE = 0.01
CHUNK = 1 << 20


def perturb(
    target: Replicas | nn.Module,
    noise: float = NOISE,
    *,
    scale: Literal["tensor", "global"] = "tensor",
    seed: int = 0,
    replica: int | None = None,
    checkpoint: Checkpoint | None = None,
) -> None:
    r"""Add noise to every trained parameter, `theta_r = theta_0 + eps_r`.

    `eps_r ~ N(0, nu^2 |theta_0|^2 / d)`, so that it has about nu times the norm of the weights.

    Do it before the first step, and after `hdet.distribute` (or `hdet.OneCycleHDET`, which calls it), which
    makes all replicas alike. The first window opens without a merge, so the noise lives until that window's
    end, when the replicas are averaged. (In the code released with the paper the constructor averages at
    once, which erases it.) Buffers, parameters without `requires_grad` and integers stay as they are; tied
    parameters are moved once, complex ones in both of their parts. Source: Cheng et al. 2026, arXiv 2604.24708.

    Args:
        target: replicas, each moved by its own index's noise; or one model, with `replica=`. What wraps it
            (DistributedDataParallel, DataParallel, torch.compile) makes no difference.
        noise: nu, the noise's norm relative to the weights'.
        scale: what |theta_0|^2 / d is taken over: each "tensor" by itself, so that a tensor of zeros stays,
            or all trained parameters together ("global").
        seed: of the noise. Replica r's is a pure function of (seed, r, parameter name); the global RNG is not
            touched.
        replica: the index of a single model.
        checkpoint: loaded into every replica first: a model's state dict, an `Engine.state_dict()` (its
            converged model), or the path of either, of the model wrapped or bare. Its parameters are theta_0.

    Raises:
        ConfigError: a noise below 0, an unknown scale, a model without `replica=`, a checkpoint that does not
            fit.

    >>> import torch, hdet
    >>> model = torch.nn.Linear(1000, 10)
    >>> replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=2)
    >>> before = model.weight.detach().clone()
    >>> hdet.perturb(replicas, noise=0.01)
    >>> round(float((model.weight.detach() - before).norm() / before.norm()), 3)
    0.01
    """
    if not 0.0 <= noise < math.inf:
        raise ConfigError(f"noise must be 0 or more and finite, relative to the weights' norm; got {noise!r}")
    if scale not in ("tensor", "global"):
        raise ConfigError(f"scale must be 'tensor' or 'global', got {scale!r}")
    if isinstance(target, Replicas):
        if replica is not None:
            raise ConfigError("replicas know their indices; leave replica= out")
        members = {m.host: (m.index, target.hosts[m.host][0]) for m in reversed(list(target.local))}
    elif replica is None:
        raise ConfigError("a single model needs replica=, the index that decides its noise")
    else:
        members = {0: (replica, _bare(target))}
    state = _model_state(checkpoint) if checkpoint is not None else None
    for index, model in members.values():
        if state is not None:
            try:
                model.load_state_dict(_without_wrappers(state, model))
            except RuntimeError as error:
                raise ConfigError(f"the checkpoint does not fit the model: {error}") from None
        _move(model, noise, scale, seed, index)


PREFIXES = ("module.", "_orig_mod.")
"""What data parallelism and torch.compile put before a parameter's name."""


def _bare(model: nn.Module) -> nn.Module:
    """The user's own module, whose names decide the noise."""
    model, _ = unwrapped(model)
    return _bare(model.module) if isinstance(model, DataParallel) else model


def _without_wrappers(state: Mapping[str, Tensor], model: nn.Module) -> Mapping[str, Tensor]:
    """A wrapped model's state under the names of the bare one."""
    own = list(model.state_dict())
    for prefix in PREFIXES * 2:  # compiled and then wrapped, or the reverse
        whole = bool(state) and all(name.startswith(prefix) for name in state)
        if whole and not all(name.startswith(prefix) for name in own):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


@torch.no_grad()
def _move(model: nn.Module, noise: float, scale: str, seed: int, replica: int) -> None:
    tensors.reshard(model)
    moved = [
        (name, tensors.as_real(parameter))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and tensors.is_inexact(parameter) and parameter.numel()
    ]
    if noise == 0.0 or not moved:
        return
    squares = [float(tensors.whole(parameter.double().square().sum())) for _, parameter in moved]
    sizes = [parameter.numel() for _, parameter in moved]
    common = (sum(squares) / sum(sizes)) ** 0.5
    for (name, parameter), square, size in zip(moved, squares, sizes, strict=True):
        deviation = noise * (common if scale == "global" else (square / size) ** 0.5)
        if deviation == 0.0:
            continue
        flat = torch.empty(size, dtype=torch.float64)
        start = 0
        for block in _normals(size, seed, replica, name):
            flat[start : start + len(block)] = torch.from_numpy(block)
            start += len(block)
        moves = (deviation * flat).reshape(parameter.shape)
        tensors.local(parameter).add_(_part(moves, parameter).to(parameter.device, parameter.dtype))


def _part(whole: Tensor, like: Tensor) -> Tensor:
    """What falls to this rank of a tensor that all ranks have drawn alike, if `like` is sharded."""
    if not hasattr(like, "device_mesh"):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    everywhere = DTensor.from_local(
        whole.to(tensors.local(like.detach()).device), mesh, [Replicate()] * mesh.ndim, run_check=False
    )
    cut: DTensor = everywhere.redistribute(placements=like.placements)  # type: ignore[attr-defined]
    return cut.to_local()


def _normals(count: int, seed: int, replica: int, name: str) -> Iterator[NDArray[np.float64]]:
    """`count` standard normal numbers in blocks, a pure function of the arguments, by Box and Muller.

    From Philox's raw words, which no version of NumPy changes; its normal generators are not promised to
    stay.
    """
    text = f"{seed}:{replica}:{name}"
    digest = blake2b(text.encode(), digest_size=16, person=b"hdet.perturb").digest()
    words = np.random.Philox(key=int.from_bytes(digest, "little"))
    while count > 0:
        pairs = (min(count, CHUNK) + 1) // 2
        uniform = ((words.random_raw(2 * pairs) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        radius, angle = np.sqrt(-2.0 * np.log(uniform[:pairs])), 2.0 * np.pi * uniform[pairs:]
        block = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[: min(count, CHUNK)]
        yield block
        count -= len(block)


def _model_state(checkpoint: Checkpoint) -> Mapping[str, Tensor]:
    if isinstance(checkpoint, Mapping):
        state: Any = checkpoint
    else:
        try:
            # Torch's old format has no checksums.
            damaged = damaged_part(checkpoint) if is_zipfile(checkpoint) else None
            if damaged is not None:
                raise ValueError(f"{damaged} in it is not as it was written")
            state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ConfigError(f"the checkpoint {os.fspath(checkpoint)!r} cannot be read: {error}") from None
    for key in ("engine", "converged", "model"):  # a run folder's, an engine's, a model file's wrappings
        if isinstance(state, Mapping) and key in state and isinstance(state[key], Mapping):
            state = state[key]
    if not (isinstance(state, Mapping) and all(isinstance(value, Tensor) for value in state.values())):
        raise ConfigError("a checkpoint is a model's state_dict, an engine's, or the path of one")
    return state
