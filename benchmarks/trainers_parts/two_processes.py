"""The trainers of several processes, here two on gloo: each takes every second sequence of a batch."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import hdet
from trainers_parts.case import Batches, Case, task

RANKS = 2
WINDOW = 10
"""Steps between two meetings of replicas that train by themselves."""


@dataclass(frozen=True)
class Ended:
    """What a run on several processes led to.

    Attributes:
        weights: the model's state dict.
        seconds: CPU time of the first process, from when it had imported what it needs.
    """

    weights: dict[str, Tensor]
    seconds: float

    def model(self, case: Case) -> nn.Module:
        model = case.model()
        model.load_state_dict(self.weights)
        return model


def deepspeed(cases: Sequence[Case]) -> list[Ended]:
    """DeepSpeed, ZeRO stage 2 in float32."""
    return [_on_two(_deepspeed, case) for case in cases]


def ray(cases: Sequence[Case]) -> list[Ended]:
    """Ray's TorchTrainer, on a local Ray; its workers, which take long to start, train one case after the other."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    _ray_started()
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            _on_a_worker,
            train_loop_config={"cases": list(cases)},
            scaling_config=ScalingConfig(num_workers=RANKS, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(storage_path=folder),
        )
        checkpoint = trainer.fit().checkpoint
        assert checkpoint is not None
        with checkpoint.as_directory() as held:
            ended: list[Ended] = torch.load(Path(held) / "ended.pt", weights_only=False)
    return ended


def torchft(cases: Sequence[Case]) -> list[Ended]:
    """torchft, gradients shared by its DistributedDataParallel."""
    return [_on_two(_torchft, case, managed=True) for case in cases]


def torchft_replicas(cases: Sequence[Case]) -> list[Ended]:
    """torchft, each group at a rate of its own; without hdet its LocalSGD."""
    return [_on_two(_torchft_replicas, case, managed=True) for case in cases]


# -- what each process does -------------------------------------------------------------------------


def _deepspeed(rank: int, case: Case) -> Ended:
    import deepspeed

    # Collectives in shared memory are compiled when they are first asked for; gloo's own do.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    began = time.process_time()
    model = case.model()
    optimizer = case.optimizer(model)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    engine = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=case.scheduler(optimizer), config=config
    )[0]
    if case.explored:
        options = case.options(forward=False)
        hdet.deepspeed.attach(engine, probe=case.probe(), total_steps=case.steps, **options)
    for tokens in _share(case, rank):
        engine.backward(engine(tokens)["loss"])
        engine.step()
    return Ended(engine.module.state_dict(), time.process_time() - began)


def _on_a_worker(given: dict[str, Any]) -> None:
    from ray.train import Checkpoint, get_context, report

    rank = get_context().get_world_rank()
    ended = [_in_ddp(rank, case) for case in given["cases"]]
    with tempfile.TemporaryDirectory() as folder:
        torch.save(ended, Path(folder) / "ended.pt")
        report({}, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)


def _in_ddp(rank: int, case: Case) -> Ended:
    from ray.train.torch import prepare_model

    _settle(case)
    began = time.process_time()
    bare = case.model()
    model = prepare_model(bare)
    optimizer = case.optimizer(model)
    scheduler = case.scheduler(optimizer)
    if case.explored:
        hdet.attach(model, optimizer, probe=case.probe(), total_steps=case.steps, scheduler=scheduler, **case.options())
    for tokens in _share(case, rank):
        model(tokens)["loss"].backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return Ended(bare.state_dict(), time.process_time() - began)


def _torchft(rank: int, case: Case) -> Ended:
    import torchft

    bare = case.model()
    inner = case.optimizer(bare)
    with _managed(rank) as manager:
        began = time.process_time()
        scheduler = case.scheduler(inner)
        model = torchft.DistributedDataParallel(manager, bare)
        optimizer = torchft.Optimizer(manager, inner)
        if case.explored:
            options = case.options(forward=False)
            options.pop("guard", None)
            hdet.torchft.attach(
                manager,
                model,
                optimizer,
                probe=case.probe(),
                total_steps=case.steps,
                scheduler=scheduler,
                **options,
            )
        for tokens in _share(case, rank):
            optimizer.zero_grad()
            model(tokens)["loss"].backward()
            optimizer.step()
            scheduler.step()
        return Ended(bare.state_dict(), time.process_time() - began)


def _torchft_replicas(rank: int, case: Case) -> Ended:
    from torchft.local_sgd import LocalSGD

    model = case.model()
    optimizer = case.optimizer(model)
    with _managed(rank) as manager:
        began = time.process_time()
        if case.explored:
            _by_replicas(manager, rank, case, model, optimizer)
        else:
            scheduler = case.scheduler(optimizer)
            with LocalSGD(manager, model, optimizer, sync_every=WINDOW):
                for tokens in _share(case, rank):
                    model(tokens)["loss"].backward()
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
        return Ended(model.state_dict(), time.process_time() - began)


def _by_replicas(manager: Any, rank: int, case: Case, model: nn.Module, optimizer: Optimizer) -> None:
    schedule = hdet.schedules.LinearDecay(case.rate, total_steps=case.steps, warmup=case.warmup)
    spread = hdet.spreads.TwoLevel(0.0 if case.held else 0.3)
    engine = hdet.Engine(
        hdet.torchft.distribute(manager, model, optimizer, group=rank, groups=RANKS),
        [hdet.LearningRate(schedule=schedule, spread=spread)],
        window=WINDOW,
        signal=case.probe(),
        gradients="local",
        evidence=hdet.evidence.Divergent(estimator=hdet.estimators.LeastSquares()),
        total_steps=case.steps,
    )
    run = hdet.torchft.ManagedEngine(engine)
    for tokens in _share(case, rank):
        with engine.replicas[0] as replica:
            loss = replica.model(tokens)["loss"]
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)


def _share(case: Case, rank: int) -> Iterator[Tensor]:
    """This process's sequences of each step's batch."""
    batches = Batches(case)
    for step in range(case.steps):
        yield batches[step]["tokens"][rank::RANKS]


# -- how processes are started ----------------------------------------------------------------------


def _on_two(work: Callable[[int, Case], Ended], case: Case, *, managed: bool = False) -> Ended:
    """What the first of two processes found, beside torchft's lighthouse where they are managed.

    Raises:
        RuntimeError: one of them failed; it has printed why.
    """
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        context = get_context("spawn")
        processes = [context.Process(target=_rank, args=(rank, port, work, case, folder)) for rank in range(RANKS)]
        with _lighthouse() if managed else contextlib.nullcontext():
            for process in processes:
                process.start()
            for process in processes:
                process.join()
        if any(process.exitcode for process in processes):
            raise RuntimeError(f"{work.__name__} ended with {[process.exitcode for process in processes]}")
        ended: Ended = torch.load(Path(folder) / "ended.pt", weights_only=False)
    return ended


def _rank(rank: int, port: int, work: Callable[[int, Case], Ended], case: Case, folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), DS_ACCELERATOR="cpu")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    _settle(case)
    with redirect_stdout(StringIO()):
        ended = work(rank, case)
    if rank == 0:
        torch.save(ended, Path(folder) / "ended.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


def _settle(case: Case) -> None:
    """One thread, the data read, and torch's optimizers imported: none of it is the run's time."""
    import torch._dynamo

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(case.seed)
    task(case.seed)


@cache
def _ray_started() -> None:
    import ray

    folders = os.pathsep.join([path for path in sys.path if path])
    ray.init(
        num_cpus=RANKS + 1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": folders, "OMP_NUM_THREADS": "1"}},
    )


@contextmanager
def _lighthouse() -> Iterator[None]:
    """torchft's lighthouse, which lets groups go on when both are there."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=RANKS, join_timeout_ms=500)
    os.environ["TORCHFT_LIGHTHOUSE"] = server.address()
    try:
        yield
    finally:
        server.shutdown()


@contextmanager
def _managed(group: int) -> Iterator[Any]:
    """torchft's manager of a group, to which nobody comes back."""
    from torchft import Manager, ProcessGroupGloo

    store = dist.TCPStore(  # type: ignore[attr-defined]
        "localhost", 0, is_master=True, wait_for_workers=False
    )
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=RANKS,
        use_async_quorum=False,
        init_sync=False,
        replica_id=f"group_{group}",
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        timeout=timedelta(seconds=60),
        quorum_timeout=timedelta(seconds=60),
    )
    try:
        yield manager
    finally:
        with contextlib.suppress(Exception):
            manager.shutdown(wait=False)
