"""Lightning: one callback, beside everything that the Trainer does itself."""

from __future__ import annotations

import inspect
import math
import runpy
import warnings
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, strategies
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning_job import BATCH, EXAMPLES, HELD, PER_EPOCH, Classifier, data, fit, loader, search
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import hdet
from hdet.errors import CheckpointError, ConfigError, StepError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*log_every_n_steps"),
]

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("none", {}),
    "one cycle, accumulated, clipped, validated inside epochs": (
        "step",
        {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1, "val_check_interval": 4},
    ),
    "by epochs, a ragged last step, bfloat16": ("epoch", {"accumulate_grad_batches": 5, "precision": "bf16-mixed"}),
    "plateau": ("plateau", {"max_epochs": 3}),
    "two optimizers as one": ("chained", {"gradient_clip_val": 0.1}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_held_it_is_the_run_without_it_bit_for_bit(name: str, tmp_path: Path, assert_same: Any) -> None:
    schedule, options = SETTINGS[name]
    plain = fit(tmp_path, Classifier(schedule), **options)
    explored = search(knobs=HELD, tail=None, **({"schedule": None} if schedule in ("none", "chained") else {}))
    assert_same(fit(tmp_path, Classifier(schedule), explored, **options), plain)
    assert len(explored.search.history) >= 1
    assert {"learning_rate", "weight_decay", "dropout"} == set(explored.search.shifts)
    steps = options.get("max_epochs", 2) * math.ceil(PER_EPOCH / options.get("accumulate_grad_batches", 1))
    assert explored.search.engine.step_count == steps
    assert explored.search.finished or schedule in ("none", "plateau", "chained")


def test_steps_that_its_gradient_scaler_skips_are_none(tmp_path: Path, assert_same: Any) -> None:
    """float16 by Lightning's own plugin: told precision="16-mixed", it takes bfloat16 on a CPU."""
    states, options = [], {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    for explored in (None, search(knobs=HELD, tail=None), search()):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)  # overflows at first, and is halved
        half = MixedPrecision("16-mixed", "cpu", scaler)
        states.append(fit(tmp_path, Classifier("step"), *([explored] if explored else ()), plugins=[half], **options))
        skipped = round(20 - math.log2(scaler.get_scale()))
        assert 0 < skipped < 5
        if explored is not None:
            assert explored.search.engine.step_count == PER_EPOCH - skipped
            told = [one["t"] for record in explored.search.history for one in record.estimates.values()]
            assert told
            assert all(math.isfinite(t) for t in told)
    assert_same(states[1], states[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: on a CPU Lightning takes bf16-mixed instead")
def test_on_a_gpu_in_half_precision_held_it_is_the_run_without_it_bit_for_bit(tmp_path: Path, assert_same: Any) -> None:
    options = {"accelerator": "gpu", "precision": "16-mixed", "gradient_clip_val": 0.1}
    plain = fit(tmp_path, Classifier("step"), **options)
    assert_same(fit(tmp_path, Classifier("step"), search(knobs=HELD, tail=None), **options), plain)


class Whole(Classifier):
    """Calls itself twice in a training step, which is one pass all the same."""

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.network(inputs)

    def loss(self, batch: Any) -> torch.Tensor:
        return (F.cross_entropy(self(batch[0]), batch[1]) + F.cross_entropy(self(batch[0]), batch[1])) / 2


def records(history: hdet.History) -> list[dict[str, Any]]:
    found = [dict(vars(record)) for record in history]
    for record in found:
        del record["seconds"], record["closing"]
    return found


def test_a_training_step_is_a_pass_however_often_it_calls_the_model(tmp_path: Path, assert_same: Any) -> None:
    found = []
    for module in (Classifier, Whole):
        explored = search(knobs=[hdet.Dropout()])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Whole, "loss", lambda self, batch: F.cross_entropy(self(batch[0]), batch[1]))
            fit(tmp_path, module("step"), explored, accumulate_grad_batches=2, gradient_clip_val=0.05)
        found.append(records(explored.search.history))
        assert any(record["estimates"]["dropout"]["stderr"] for record in found[-1])
    assert found[0] == found[1]
    fit(tmp_path, Whole("step"), explored := search(), accumulate_grad_batches=2)
    assert explored.search.finished


@pytest.mark.parametrize("schedule", ["none", "step", "epoch", "chained"])
def test_resumed_from_the_trainers_own_checkpoint_it_is_the_same_run(
    schedule: str, tmp_path: Path, assert_same: Any
) -> None:
    kept = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=7, save_top_k=-1)
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "epochs": 4, "val_check_interval": 4}
    straight = search()
    states = fit(tmp_path, Classifier(schedule), straight, kept, enable_checkpointing=True, **options)
    path = tmp_path / "step=14.ckpt"  # in mid-epoch and in mid-window
    again = search()
    assert_same(fit(tmp_path, Classifier(schedule), again, resumed=path, **options), states)
    assert again.search.shifts == straight.search.shifts
    assert again.search.shifts["learning_rate"].factor != 1.0
    assert records(again.search.history)[-1] == records(straight.search.history)[-1]


def test_what_closed_is_logged_by_the_modules_names(tmp_path: Path) -> None:
    explored = search()
    logger = CSVLogger(tmp_path)
    module = Classifier("step")
    fit(tmp_path, module, explored, logger=logger, log_every_n_steps=1)
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("hdet/value/learning_rate")
    logged = [float(row.split(",")[column]) for row in rows[1:] if row.split(",")[column]]
    assert logged[-1] == pytest.approx(explored.search.shifts["learning_rate"].value, rel=1e-6)
    assert {"hdet/factor/dropout", "hdet/window/loss", "hdet/now/weight_decay"} <= set(rows[0].split(","))
    assert math.isfinite(module.trainer.callback_metrics["hdet/factor/learning_rate"])


def logged_windows(logger: CSVLogger) -> list[int]:
    """The steps, counted from 1, at which windows were logged."""
    header, *rows = (line.split(",") for line in (Path(logger.log_dir) / "metrics.csv").read_text().splitlines())
    column, step = header.index("hdet/value/learning_rate"), header.index("step")
    return [int(row[step]) + 1 for row in rows if row[column]]


def test_every_window_is_logged_at_its_step_however_seldom_the_trainer_logs(tmp_path: Path) -> None:
    explored, logger = search(), CSVLogger(tmp_path)
    fit(tmp_path, Classifier("step"), explored, logger=logger)
    assert logged_windows(logger) == [record.stop for record in explored.search.history]


def test_a_last_window_that_ends_with_training_is_logged_there(tmp_path: Path) -> None:
    """Of steps that a gradient scaler skips some are missing at the end, and the window is closed without them."""
    explored, logger = search(), CSVLogger(tmp_path)
    half = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**18))
    fit(tmp_path, Classifier("step"), explored, epochs=4, plugins=[half], logger=logger)
    stops = [record.stop for record in explored.search.history]
    assert stops[-1] < 4 * PER_EPOCH  # the Trainer counts steps that were skipped, too
    skipped = 4 * PER_EPOCH - stops[-1]
    assert logged_windows(logger) == [stop + skipped for stop in stops]


def test_what_an_interrupted_training_left_unlogged_is_not_the_next_ones(tmp_path: Path) -> None:
    class Interrupted(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 5:  # which ends the first window
                raise RuntimeError

    explored, logger = search(), CSVLogger(tmp_path)
    with pytest.raises(RuntimeError):
        fit(tmp_path, Classifier("step"), Interrupted(), explored)
    fit(tmp_path, Classifier("step"), explored, logger=logger, accumulate_grad_batches=2)
    assert logged_windows(logger) == [record.stop for record in explored.search.history]
    assert explored.search.state_dict()["lost"] == 0


def test_the_loss_of_a_module_that_steps_by_itself_is_heard(tmp_path: Path) -> None:
    class Manual(Classifier):
        def __init__(self) -> None:
            super().__init__("none")
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    explored = search(schedule=None)
    fit(tmp_path, Manual(), explored)
    assert len(explored.search.history) >= 1
    assert all(loss is not None for record in explored.search.history for loss in record.losses)


@pytest.mark.parametrize("told", [False, True])
def test_a_module_that_accumulates_by_hand_is_to_say_its_steps(told: bool, tmp_path: Path) -> None:
    """Its Trainer counts one for each batch."""

    class Accumulating(Classifier):
        def __init__(self) -> None:
            super().__init__("none")
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            self.manual_backward(self.loss(batch))
            if index % 2:
                optimizer = self.optimizers()
                optimizer.step()
                optimizer.zero_grad()

    explored = search(total_steps=PER_EPOCH) if told else search()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(tmp_path, Accumulating(), explored, epochs=2)
    counted = [str(one.message) for one in said if "and the Trainer counts its steps as if each" in str(one.message)]
    assert len(counted) == (not told)
    assert explored.search.engine.step_count == PER_EPOCH
    assert explored.search.finished == told


class Seldom(Classifier):
    """Steps on every second batch, or on every fourth, by its own `optimizer_step`."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if (batch_idx + 1) // self.trainer.accumulate_grad_batches % 2:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize(
    "length", [{"epochs": 2}, {"epochs": 4, "accumulate_grad_batches": 2}, {"epochs": -1, "max_steps": 2 * PER_EPOCH}]
)
@pytest.mark.parametrize("told", [False, True])
def test_a_module_whose_own_step_leaves_batches_out_is_to_say_its_steps(
    told: bool, length: dict[str, int], tmp_path: Path
) -> None:
    """Its Trainer counts the steps that it asks for."""
    explored = search(total_steps=PER_EPOCH) if told else search()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(tmp_path, Seldom("none"), explored, **length)  # type: ignore[arg-type]
    counted = [str(one.message) for one in said if "and the Trainer counts its steps as if each" in str(one.message)]
    assert len(counted) == (not told)
    assert explored.search.engine.step_count == PER_EPOCH
    assert explored.search.finished == told


def test_a_module_that_leaves_out_the_first_batches_alone_is_told_nothing(tmp_path: Path) -> None:
    class Late(Classifier):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if epoch == 0 and batch_idx < 6:
                optimizer_closure()
            else:
                optimizer.step(closure=optimizer_closure)

    explored = search()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(tmp_path, Late("none"), explored, epochs=2)
    assert explored.search.engine.step_count == 2 * PER_EPOCH - 6
    assert not [one for one in said if "and the Trainer counts its steps as if each" in str(one.message)]


def test_names_that_lightning_may_change_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("lightning.pytorch.core.optimizer._MockOptimizer")
    monkeypatch.delattr("lightning.pytorch.strategies.launchers._MultiProcessingLauncher")
    assert runpy.run_path(inspect.getfile(hdet.lightning.Search))["Search"]


def test_where_other_processes_train_it_is_told_where_the_outcome_will_be(tmp_path: Path) -> None:
    for options, strategy, told in (
        ({}, "ddp_spawn", 1),
        ({"history": tmp_path / "h"}, "ddp_spawn", 0),
        ({}, "ddp", 0),
    ):
        trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, barebones=True)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            search(**options).setup(trainer, Classifier(), "fit")
        assert len([one for one in said if "this strategy trains in processes of its own" in str(one.message)]) == told


class Uneven(Classifier):
    """One of its epochs has fewer steps, in the way that the class says."""

    how = ""

    def on_train_batch_start(self, batch: Any, index: int) -> int | None:
        return -1 if self.how == "ended" and index == 7 and self.trainer.current_epoch == 0 else None

    def on_train_epoch_start(self) -> None:
        if self.how == "accumulated":
            self.trainer.accumulate_grad_batches = 2 if self.trainer.current_epoch == 0 else 1

    def train_dataloader(self) -> DataLoader[Any]:
        count = EXAMPLES // 2 if self.how == "reloaded" and self.trainer.current_epoch == 1 else EXAMPLES
        return loader(count)


@pytest.mark.parametrize(
    ("how", "made"),
    [
        ("as foreseen", None),
        ("ended", "epoch 0 made 7 optimizer steps"),
        ("accumulated", "epoch 0 made 6 optimizer steps"),
        ("reloaded", "epoch 1 made 6 optimizer steps"),
    ],
)
def test_an_epoch_of_other_steps_than_the_length_was_worked_out_from_is_told(
    how: str, made: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Uneven, "how", how)
    explored = search()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=3,
        callbacks=[explored],
        reload_dataloaders_every_n_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(Uneven("none"), val_dataloaders=loader(32, seed=3))
    told = [str(one.message) for one in said if "and the run's length was worked out from" in str(one.message)]
    assert explored.search.finished == (made is None)
    assert [one.partition(", and")[0] for one in told] == ([] if made is None else [made])


@pytest.mark.parametrize("examples", [EXAMPLES // 4, 2 * EXAMPLES])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_search_that_begins_after_epochs_of_other_lengths_counts_the_steps_that_are_left(
    resumed: bool, examples: int, tmp_path: Path
) -> None:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    kept = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    before = Trainer(max_epochs=2, callbacks=[kept] if resumed else [search()], default_root_dir=tmp_path, **quiet)
    module, held_out = Classifier("none"), loader(32, seed=3)
    module.batches = list(loader(2 * EXAMPLES))
    before.fit(module, loader(), held_out)
    explored = search()
    if resumed:
        trainer = Trainer(max_epochs=5, callbacks=[explored], default_root_dir=tmp_path, **quiet)
    else:
        trainer, explored = before, next(one for one in before.callbacks if isinstance(one, hdet.lightning.Search))
        trainer.fit_loop.max_epochs = 5
    trainer.fit(module, loader(examples), held_out, ckpt_path=tmp_path / "last.ckpt" if resumed else None)
    assert explored.search.engine.total_steps == 3 * examples // BATCH
    assert explored.search.engine.step_count == 3 * examples // BATCH
    assert explored.search.finished


def test_a_probe_that_is_the_training_data_is_warned_of(tmp_path: Path) -> None:
    same = loader()
    with pytest.warns(UserWarning, match="the probe is the data that the model trains on"):
        fit(tmp_path, Classifier("step"), search(probe=same), train=same)


def test_the_validation_loss_may_be_logged_instead_of_returned(tmp_path: Path) -> None:
    found = []
    for logs in (False, True):
        explored = search()
        fit(tmp_path, Classifier("step", logs=logs), explored)
        found.append(records(explored.search.history))
    assert found[0] == found[1]


class Prepared(Classifier):
    """Prepares its batches by hooks: some in training alone, by numbers drawn at random."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [*batch, "prepared"]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        inputs, labels, prepared = batch
        augmented = self.trainer.training or self.training
        return [inputs + torch.randn_like(inputs), labels, f"{prepared}, augmented" if augmented else prepared]

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, index: int) -> torch.Tensor:
        print(batch[2], self.trainer.validating or self.trainer.sanity_checking)
        return super().validation_step(batch, index)


def test_the_probes_batches_are_prepared_as_those_of_validation(
    tmp_path: Path, assert_same: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = fit(tmp_path, Prepared())
    explored = search(knobs=HELD, tail=None)
    assert_same(fit(tmp_path, Prepared(), explored), plain)
    assert set(capsys.readouterr().out.splitlines()) == {"prepared True"}


class Shared(Classifier):
    """Its training and a probe call one method, which logs and takes notes."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[int] = []
        self.told: list[tuple[float, int]] = []

    def shared_step(self, batch: Any) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("shared", loss, on_step=False, on_epoch=True)
        self.noted.append(1)
        return loss

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.shared_step(batch)

    def on_fit_end(self) -> None:
        self.told.append((float(self.trainer.callback_metrics["shared"]), len(self.noted)))


def test_what_a_module_begins_to_note_in_a_probe_is_not_there_as_it_validates(tmp_path: Path) -> None:
    class Late(Classifier):
        def __init__(self) -> None:
            super().__init__("step")
            self.first: float | None = None
            self.sizes: list[int] = []
            self.passes: list[bool] = []

        def validation_step(self, batch: Any, index: int) -> Any:
            loss = super().validation_step(batch, index)
            if not hasattr(self, "losses"):
                self.losses: list[Any] = []
            if not hasattr(self, "hooked"):
                self.hooked = True  # once and for all
                self.register_forward_hook(lambda *_: self.passes.append(self.training))
            self.losses.append(loss)
            self.first = loss.item() if self.first is None else self.first
            return loss

        def on_validation_epoch_end(self) -> None:
            super().on_validation_epoch_end()
            self.sizes.append(len(self.losses))
            del self.losses

    found = []
    for callbacks in ((), (search(knobs=HELD, tail=None),)):
        module = Late()
        fit(tmp_path, module, *callbacks, num_sanity_val_steps=0)
        found.append((module.sizes, module.first))
        assert len(module._forward_hooks) == 1
    assert found[0] == found[1]


def test_what_a_module_logs_and_notes_in_a_probe_of_hdets_is_not_of_training(tmp_path: Path) -> None:
    plain, judged = Shared(), Shared()
    fit(tmp_path, plain)
    probe = hdet.Probe(lambda module, batch: module.shared_step(batch), list(loader(64, seed=2)))
    fit(tmp_path, judged, search(knobs=HELD, tail=None, probe=probe))
    assert plain.told == judged.told
    assert plain.told[0][1] == 2 * PER_EPOCH


class Unnumbered(Classifier):
    def validation_step(self, batch: Any) -> torch.Tensor:  # type: ignore[override]
        return self.loss(batch)


class OfSeveral(Classifier):
    def validation_step(self, batch: Any, index: int, dataloader_idx: int) -> torch.Tensor:  # type: ignore[override]
        return self.loss(batch)


@pytest.mark.parametrize("kind", [Unnumbered, OfSeveral])
def test_a_validation_step_is_given_the_numbers_that_it_takes(kind: type[Classifier], tmp_path: Path) -> None:
    explored = search()
    fit(tmp_path, kind(), explored, limit_val_batches=0)  # of two DataLoaders, say
    assert explored.search.finished


def test_a_probe_of_hdets_is_given_the_module(tmp_path: Path) -> None:
    given: list[LightningModule] = []

    def loss(module: LightningModule, batch: Any) -> torch.Tensor:
        given.append(module)
        return module.loss(batch)  # type: ignore[operator, no-any-return]

    module = Classifier("step")
    explored = search(probe=hdet.Probe(loss, list(loader(64, seed=2))))
    fit(tmp_path, module, explored)
    assert given
    assert all(one is module for one in given)
    straight = search()
    fit(tmp_path, Classifier("step"), straight)
    assert records(straight.search.history) == records(explored.search.history)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    for options in ({}, {"max_steps": 5}):
        module = Classifier("step")
        explored = search(total_steps=24)
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=2,
            callbacks=[explored],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,  # type: ignore[arg-type]
        )
        trainer.fit(module, loader(), loader(32, seed=3))
        assert "training_step" not in vars(trainer.strategy)
        assert "log" not in vars(module)
        assert not module._forward_pre_hooks
        assert module.network[2].p == 0.2
        assert explored.search.engine.step_count == trainer.global_step


def falling(step: int) -> float:
    return 3e-3 * (1 - step / (2 * PER_EPOCH))


class Writing(Classifier):
    """Writes its rates itself."""

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        for group in self.optimizers().param_groups:
            group["lr"] = falling(self.trainer.global_step)


def test_rates_that_a_module_writes_itself_are_looked_ahead_at(tmp_path: Path, assert_same: Any) -> None:
    plain = fit(tmp_path, Writing("none"))
    explored = search(knobs=HELD, tail=None, scheduler=falling)
    assert_same(fit(tmp_path, Writing("none"), explored), plain)
    assert explored.search.finished
    assert explored.search.engine.knobs[0].schedule.total_steps == 2 * PER_EPOCH


class Two(Classifier):
    """Two optimizers, stepped by the module itself."""

    def __init__(self) -> None:
        super().__init__("none")
        self.automatic_optimization = False
        self.other = nn.Linear(4, 3)

    def training_step(self, batch: Any, index: int) -> None:
        for module, optimizer in zip((self.network, self.other), self.optimizers(), strict=True):  # type: ignore[arg-type]
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(module(batch[0]), batch[1]))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=1e-4) for part in (self.network, self.other)]


def test_of_several_optimizers_the_one_that_is_said_is_searched(tmp_path: Path) -> None:
    probe = hdet.Probe(
        lambda module, batch: F.cross_entropy(module.other(batch[0]), batch[1]), list(loader(64, seed=2))
    )
    explored = search(probe=probe, optimizer=1, total_steps=24)
    module = Two()
    fit(tmp_path, module, explored)
    assert explored.search.finished
    assert explored.search.optimizer is module.trainer.optimizers[1]
    assert explored.search.model is module.other
    assert set(explored.search.shifts) == {"learning_rate", "weight_decay"}
    assert explored.search.shifts["learning_rate"].factor > 1.5


class Unjudged(Classifier):
    validation_step = LightningModule.validation_step  # type: ignore[assignment]


class Silent(Classifier):
    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_accuracy", 1.0)


class Unstepped(Classifier):
    def configure_optimizers(self) -> None:
        return None


HELD_OUT: Any = loader(64).dataset
SHARED_OUT = DataLoader(HELD_OUT, 8, sampler=DistributedSampler(HELD_OUT, num_replicas=2, rank=0))
REFUSED: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "several optimizers": (Two, {}, {}, r"returns 2 optimizers \(0: AdamW, 1: AdamW\); say which one is searched"),
    "no such optimizer": (Two, {"optimizer": 2}, {}, "optimizer=2, and configure_optimizers returns 2"),
    "several optimizers' length": (Two, {"optimizer": 1}, {}, r"Search\(total_steps=...\), in steps of the one"),
    "no length": (Classifier, {}, {"epochs": -1}, "the Trainer does not know its length"),
    "no validation step": (Unjudged, {}, {}, "Unjudged has no validation_step to judge the probe's batches by"),
    "no optimizer": (Unstepped, {}, {}, "configure_optimizers returns no optimizer, and hdet searches one's"),
    "no loss": (
        Silent,
        {},
        {},
        r"validation_step returns no loss and logs none as 'val_loss' \(it logs \['val_accuracy'\]\)",
    ),
    "one batch": (Classifier, {"probe": loader(8, seed=2)}, {}, "the probe's DataLoader gives 1 full batches"),
    "a rank's batches": (Classifier, {"probe": SHARED_OUT}, {}, "the probe's DataLoader has a DistributedSampler"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_and_says_the_way_out(name: str, tmp_path: Path) -> None:
    module, options, trainer, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path, module() if module is Two else module("none"), search(**options), **trainer)


def test_where_accumulation_changes_the_length_has_to_be_told(tmp_path: Path) -> None:
    """The Trainer's own count is that of the accumulation at the beginning."""
    twice = GradientAccumulationScheduler({0: 1, 1: 2})
    with pytest.raises(ConfigError, match="GradientAccumulationScheduler changes how many batches a step takes"):
        fit(tmp_path, Classifier("none"), search(), twice)
    explored = search(total_steps=PER_EPOCH + PER_EPOCH // 2)
    fit(tmp_path, Classifier("none"), explored, GradientAccumulationScheduler({0: 1, 1: 2}))
    assert explored.search.finished


def test_an_accumulation_that_its_callback_keeps_is_the_trainers(tmp_path: Path, assert_same: Any) -> None:
    """The Trainer is told of it as the first epoch begins, after the search has."""
    steps = 2 * PER_EPOCH // 4
    for module, options in (("none", {}), ("epoch", {"knobs": HELD, "tail": None})):
        explored = search(**options)
        left = fit(tmp_path, Classifier(module), explored, GradientAccumulationScheduler({0: 4}))
        assert explored.search.engine.step_count == steps
        assert explored.search.finished
    assert_same(left, fit(tmp_path, Classifier("epoch"), GradientAccumulationScheduler({0: 4})))


def test_where_accumulation_changes_a_scheduler_by_epochs_is_followed(tmp_path: Path, assert_same: Any) -> None:
    """Its epochs have another number of steps each, so that none is foretold; one by steps is."""
    for schedule in ("epoch", "step"):
        explored = search(knobs=HELD, tail=None, total_steps=PER_EPOCH + 5 * PER_EPOCH // 3)
        runs = [
            fit(tmp_path, Classifier(schedule), *callbacks, GradientAccumulationScheduler({0: 1, 1: 3}), epochs=6)
            for callbacks in ((explored,), ())
        ]
        assert_same(*runs)
        assert explored.search.finished


@pytest.mark.parametrize(("accumulated", "foretold"), [(5, False), (6, True)])
def test_a_scheduler_by_batches_that_epochs_cut_short_is_followed(
    accumulated: int, foretold: bool, tmp_path: Path, assert_same: Any
) -> None:
    """Its frequency counts an epoch's batches: of 12 it is stepped at the 10th and the 12th, and steps are of 5."""

    class Frequent(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
            return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 2}]

    explored = search(knobs=HELD, tail=None)
    options: dict[str, Any] = {"epochs": 4, "accumulate_grad_batches": accumulated}
    runs = [fit(tmp_path, Frequent(), *callbacks, **options) for callbacks in ((explored,), ())]
    assert_same(*runs)
    assert explored.search.finished
    assert (explored.search._riding.rates.follower is not None) is foretold


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(data(EXAMPLES, seed=1))


def test_a_scheduler_by_epochs_of_a_stream_is_followed(tmp_path: Path, assert_same: Any) -> None:
    """Nobody knows beforehand how many steps an epoch has."""
    runs = []
    for callbacks in ((), (search(knobs=HELD, tail=None),)):
        stream: Any = DataLoader(Stream(), batch_size=BATCH)
        runs.append(fit(tmp_path, Classifier("epoch"), *callbacks, train=stream, epochs=9, max_steps=2 * PER_EPOCH))
    assert_same(*runs)
    assert callbacks[0].search.finished


class Normed(Classifier):
    """Lightning's averaging gives it an epoch more, in which BatchNorm's statistics are made anew."""

    def __init__(self) -> None:
        super().__init__("none")
        self.norm = nn.BatchNorm1d(2)


def test_where_averaging_adds_an_epoch_without_steps_the_length_has_to_be_told(tmp_path: Path) -> None:
    averaging: dict[str, Any] = {"swa_lrs": 1e-3, "swa_epoch_start": 1}
    with pytest.raises(ConfigError, match="StochasticWeightAveraging adds an epoch without steps for BatchNorm"):
        fit(tmp_path, Normed(), search(schedule=None), StochasticWeightAveraging(**averaging))
    with pytest.raises(ConfigError, match="StochasticWeightAveraging writes the learning rates as it begins"):
        fit(tmp_path, Classifier("none"), search(), StochasticWeightAveraging(**averaging))
    explored = search(total_steps=2 * PER_EPOCH, schedule=None)
    fit(tmp_path, Normed(), explored, StochasticWeightAveraging(**averaging))
    assert explored.search.finished
    by_steps: dict[str, Any] = {"epochs": -1, "max_steps": PER_EPOCH + 2}
    for module, options in ((Classifier("none"), {}), (Normed(), by_steps)):
        explored = search(schedule=None)
        fit(tmp_path, module, explored, StochasticWeightAveraging(**averaging), **options)
        assert explored.search.finished


class Tuned(Classifier):
    """A part of it is frozen until an epoch; the optimizer has all of it, or the rest, as Lightning's examples do."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__("none")
        self.backbone = self.network[0]
        self.whole = whole

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if self.whole or parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.1)


def test_a_backbone_that_joins_the_optimizer_in_mid_run_is_refused_before_the_first_step(tmp_path: Path) -> None:
    for schedule, options in ({}, {"epochs": 3}), ({"schedule": None}, {"epochs": -1, "max_steps": PER_EPOCH + 1}):
        explored = search(**schedule)
        with pytest.raises(
            ConfigError, match="BackboneFinetuning gives the optimizer a group of parameters more in ep"
        ):
            fit(tmp_path, Tuned(whole=False), explored, BackboneFinetuning(1), **options)
        assert explored.search is None
    late = search(schedule=None)
    fit(tmp_path, Tuned(whole=False), late, BackboneFinetuning(2))
    assert late.search.finished, "it would join after the run's end"


def test_once_a_backbone_has_joined_a_resumed_run_is_searched(tmp_path: Path, assert_same: Any) -> None:
    saved = ModelCheckpoint(dirpath=tmp_path, filename="joined", save_on_train_epoch_end=True)
    fit(tmp_path, Tuned(whole=False), BackboneFinetuning(1), saved, enable_checkpointing=True)
    runs = []
    for callbacks in ((), (search(knobs=HELD, tail=None, schedule=None),)):
        module, joins = Tuned(whole=False), BackboneFinetuning(1)
        runs.append(fit(tmp_path, module, *callbacks, joins, epochs=4, resumed=tmp_path / "joined.ckpt"))
    assert_same(*runs)
    assert callbacks[0].search.finished


def test_a_backbone_that_the_optimizer_has_from_the_start_may_be_trained_later(
    tmp_path: Path, assert_same: Any
) -> None:
    runs = []
    for callbacks in ((), (search(knobs=HELD, tail=None, schedule=None),)):
        runs.append(fit(tmp_path, Tuned(whole=True), *callbacks, BackboneFinetuning(1), epochs=3))
    assert_same(*runs)
    assert callbacks[0].search.finished


def test_options_are_checked_when_they_are_given() -> None:
    with pytest.raises(ConfigError, match=r"no such option: \['knob'\]; there are \['anchor'"):
        search(knob=[])
    with pytest.raises(ConfigError, match=r"probe is an hdet.Probe or a DataLoader, got int"):
        search(probe=3)


def test_a_command_line_can_make_the_callback_with_its_probe() -> None:
    """As LightningCLI does; jsonargparse makes a DataLoader for that class alone, not for one with a parameter."""
    assert DataLoader in get_args(get_type_hints(hdet.lightning.Search.__init__)["probe"])
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--callback", type=Callback)
    made = {"class_path": f"{__name__}.loader", "init_args": {"seed": 2}}
    given = {"class_path": "hdet.lightning.Search", "init_args": {"probe": made}, "dict_kwargs": {"window": 5}}
    callback = parser.instantiate(parser.parse_object({"callback": given})).callback
    assert isinstance(callback._probe, DataLoader)
    assert callback._options == {"window": 5}


@pytest.mark.parametrize(
    ("kind", "does"),
    [
        (strategies.DeepSpeedStrategy, "DeepSpeedStrategy steps master weights"),
        (strategies.FSDPStrategy, "FSDPStrategy wraps the model"),
    ],
)
def test_strategies_that_cut_parameters_or_masters_are_refused_by_name(kind: type[Any], does: str) -> None:
    """On a CPU Lightning refuses them itself, so the strategy is put into a Trainer that is there."""
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True)
    trainer._accelerator_connector.strategy = object.__new__(kind)
    with pytest.raises(ConfigError, match=f"Lightning's {does}.* give the Trainer ModelParallelStrategy"):
        search().on_train_start(trainer, Classifier())


def test_a_training_that_was_stopped_early_is_taken_up_again(tmp_path: Path) -> None:
    """Its last checkpoint is written when it has ended."""

    class Stop(Callback):
        def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
            trainer.should_stop = trainer.global_step >= PER_EPOCH

    last = ModelCheckpoint(dirpath=tmp_path, save_last=True, every_n_train_steps=10_000)
    first, second = search(), search()
    fit(tmp_path, Classifier("none"), first, Stop(), last, enable_checkpointing=True)
    assert not first.search.finished
    fit(tmp_path, Classifier("none"), second, resumed=tmp_path / "last.ckpt")
    assert second.search.finished


def test_a_checkpoint_that_was_evaluated_is_none_to_train_on_from(tmp_path: Path, assert_same: Any) -> None:
    """`validate` and `test` restore callbacks, too, and the next `fit` is a run of its own."""
    kept = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=14)
    straight, explored = search(), search()
    states = fit(tmp_path, Classifier("none"), straight, kept, enable_checkpointing=True)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", max_epochs=2, callbacks=[explored], default_root_dir=tmp_path, **quiet)
    validated = Classifier("none")
    trainer.validate(validated, loader(32, seed=3), ckpt_path=tmp_path / "step=14.ckpt", verbose=False)
    module = Classifier("none")
    trainer.fit(module, loader(), loader(32, seed=3))
    assert_same(module.state_dict(), states[0])
    assert records(explored.search.history) == records(straight.search.history)


def test_a_second_training_finds_its_rate_and_begins_a_search_of_its_own(tmp_path: Path) -> None:
    """Lightning's finder saves what callbacks hold, and puts it back after its trial."""

    class Found(Classifier):
        lr = 3e-3

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=self.lr)

    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    explored = search()
    finder = LearningRateFinder(num_training_steps=10)
    trainer = Trainer(accelerator="cpu", max_epochs=1, callbacks=[finder, explored], default_root_dir=tmp_path, **quiet)
    for epochs in (1, 3):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(Found("none"), loader(), loader(32, seed=3))
        assert explored.search.finished
    assert explored.search.engine.step_count == 2 * PER_EPOCH


def test_a_state_of_another_form_is_refused(tmp_path: Path) -> None:
    explored = search()
    explored.load_state_dict({"search": {}})
    with pytest.raises(CheckpointError, match=r"hdet\.lightning\.Search holds no search of this version of hdet"):
        fit(tmp_path, Classifier("none"), explored)


def test_a_state_that_the_callback_is_given_by_hand_is_gone_on_with(tmp_path: Path) -> None:
    first, second = search(), search()
    fit(tmp_path, Classifier("none"), first)
    second.load_state_dict(first.state_dict())
    with pytest.raises(StepError, match="the run is over"):
        fit(tmp_path, Classifier("none"), second)
