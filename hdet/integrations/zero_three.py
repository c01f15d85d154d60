"""A model that DeepSpeed's ZeRO stage 3 has partitioned, as one of sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hdet.errors import ConfigError, StepError
from hdet.replicas import tensors


class Shards(tensors.Partitioned):
    """DeepSpeed's partitions of a model's parameters, each a `DTensor` in the partition's own memory.

    Between passes DeepSpeed holds a parameter's partition in `ds_tensor`, and an empty tensor in its place. What it
    keeps whole beside that, because it is small or soon to be used, is gathered anew in the first pass after hdet has
    written partitions. Everything else is the module's.

    Args:
        engine: a DeepSpeed engine of stage 3.

    Raises:
        ConfigError: partitions are not where they are looked for.
        StepError: they are no longer, when hdet next looks.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__()
        _refuse(engine)
        self.module: nn.Module = engine.module
        self._release: Callable[[], None] = engine.optimizer.parameter_offload.partition_all_parameters
        self._whole: dict[str, Any] = dict(engine.module.named_parameters())
        group = next(iter(self._whole.values())).ds_process_group
        _clear_padding(engine.optimizer, self._whole.values(), dist.get_rank(group))
        mesh = DeviceMesh.from_group(group, next(iter(self._whole.values())).ds_tensor.device.type)
        self._shards = {name: _shard(parameter, mesh) for name, parameter in self._whole.items()}
        self._local: list[Tensor] = [shard.to_local().detach() for shard in self._shards.values()]  # type: ignore[attr-defined]

    def of(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """The shards of some of the module's parameters."""
        name = {id(parameter): name for name, parameter in self._whole.items()}
        return [self._shards[name[id(parameter)]] for parameter in parameters]

    def reshard(self) -> None:
        for (name, parameter), local in zip(self._whole.items(), self._local, strict=True):
            if parameter.ds_tensor.data_ptr() != local.data_ptr():
                raise StepError(
                    f"DeepSpeed has moved {name} to other memory since hdet was attached, as offload_states does, and "
                    f"what hdet writes no longer reaches it; leave offload_states out while a search is attached"
                )
        self._release()

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.module(*arguments, **keywords)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, shard in self._shards.items():
            shard.requires_grad_(self._whole[name].requires_grad)
            yield f"{prefix}.{name}" if prefix else name, shard

    def register_forward_pre_hook(self, *arguments: Any, **keywords: Any) -> Any:
        """On the module that the loop calls."""
        return self.module.register_forward_pre_hook(*arguments, **keywords)

    def register_forward_hook(self, *arguments: Any, **keywords: Any) -> Any:
        """On the module that the loop calls."""
        return self.module.register_forward_hook(*arguments, **keywords)

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        """This rank's shards, and the module's buffers."""
        named = (*self.named_parameters(), *self.module.named_buffers())
        return {name: tensors.local(held.detach()) for name, held in named}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        self.reshard()
        own = self.state_dict()
        for name, value in state_dict.items():
            own[name].copy_(value)


def _refuse(engine: Any) -> None:
    """What moves partitions elsewhere, or gathers parameters from other memory."""
    stored = {
        "offload_param": engine.zero_offload_param() is not None,
        "offload_optimizer": engine.zero_offload_optimizer() is not None,
        "zero_hpz_partition_size": engine.zero_hpz_partition_size() > 1,
        "zero_quantized_weights": engine.zero_quantized_weights(),
        "zero_quantized_nontrainable_weights": engine.zero_quantized_nontrainable_weights(),
    }
    found = next((option for option, given in stored.items() if given), None)
    if found is not None:
        raise ConfigError(
            f"the DeepSpeed engine runs ZeRO stage 3 with {found}, under which a parameter's partition is not the one "
            f"that its layers are gathered from, or lies elsewhere between steps; leave {found} out, or use stage 1 "
            f"or 2"
        )
    for name, parameter in engine.module.named_parameters():
        ranks = dist.get_world_size(parameter.ds_process_group) if hasattr(parameter, "ds_tensor") else 0
        if ranks != dist.get_world_size():
            raise ConfigError(
                f"{name} is partitioned over {ranks} of {dist.get_world_size()} ranks, and under ZeRO stage 3 hdet "
                f"reads parameters that are partitioned over all; leave MiCS and expert parallelism out, or use stage "
                f"1 or 2"
            )


def _shard(parameter: Any, mesh: DeviceMesh) -> nn.Parameter:
    held = DTensor.from_local(parameter.ds_tensor.detach(), mesh, [Shard(0)], run_check=False)
    return nn.Parameter(held, requires_grad=parameter.requires_grad)


@torch.no_grad()
def _clear_padding(optimizer: Any, parameters: Any, rank: int) -> None:
    """The last ranks' partitions end in memory that DeepSpeed leaves as it found it: it may hold NaN."""
    padding = {}
    for parameter in parameters:
        size = parameter.partition_numel()
        padding[parameter.ds_id] = min(size, max(0, (rank + 1) * size - parameter.ds_numel))
        parameter.ds_tensor[size - padding[parameter.ds_id] :].zero_()
    for group, masters in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        ends = masters.split([parameter.partition_numel() for parameter in group])
        for parameter, end in zip(group, ends, strict=True):
            end[parameter.partition_numel() - padding[parameter.ds_id] :].zero_()
