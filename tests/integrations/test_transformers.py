"""`hdet.transformers.Search` in the real Trainer."""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Text, gpt2, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset
from transformers import Trainer

import hdet
from hdet.controllers import Hold
from hdet.errors import CheckpointError, ConfigError
from hdet.integrations import transformers as integration
from hdet.spreads import TwoLevel

HELD = [
    hdet.LearningRate(controller=Hold()),
    hdet.WeightDecay(controller=Hold()),
    hdet.Dropout(controller=Hold(), spread=TwoLevel(0.0)),
]
"""Measured as ever and moved nowhere."""


def search(made: Trainer, **options: Any) -> hdet.transformers.Search:
    callback = hdet.transformers.Search(probe=made.eval_dataset, **options)
    made.add_callback(callback)
    return callback


def states(made: Trainer) -> list[Any]:
    return [made.model.state_dict(), made.optimizer.state_dict(), made.lr_scheduler.state_dict()]


def own_logs(made: Trainer) -> list[dict[str, Any]]:
    """The Trainer's, without its speed and what a resume counts anew."""
    return [
        {key: value for key, value in entry.items() if key in ("grad_norm", "learning_rate", "eval_loss", "step")}
        for entry in made.state.log_history
        if not any(key.startswith("hdet/") for key in entry)
    ]


RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation weighted by tokens": {"gradient_accumulation_steps": 4, "ragged": True, "examples": 84},
    "warm-up from 0 and bf16": {"warmup_steps": 5, "bf16": True},
    "evaluation inside, checkpointing, clipping": {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "gradient_checkpointing": True,
        "max_grad_norm": 0.1,
    },
    "smoothed labels": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2, "ragged": True},
    "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 3},
}


@pytest.mark.parametrize("name", RUNS)
def test_held_it_is_the_run_without_it_bit_for_bit(name: str, tmp_path: Path, assert_same: Any) -> None:
    found = []
    for held in (False, True):
        made = trainer(gpt2(), tmp_path, **RUNS[name])
        callback = search(made, knobs=HELD, tail=None) if held else None
        made.train()
        losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
        found.append([*copy.deepcopy(states(made)), own_logs(made), losses])
        if callback is not None:
            assert callback.search is not None
            assert callback.search.finished
            assert callback.search.engine.step_count == 20
            judged = [record.estimates["learning_rate"]["t"] for record in callback.search.history]
            assert judged
            assert all(math.isfinite(t) for t in judged)
            logged = [entry for entry in made.state.log_history if "hdet/now/learning_rate" in entry]
            assert [entry["step"] for entry in logged] == [record.stop for record in callback.search.history]
        assert "training_step" not in vars(made)
        assert not made.model._forward_hooks
    assert_same(*found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: on a CPU Accelerate leaves fp16 out")
def test_on_a_gpu_in_half_precision_held_it_is_the_run_without_it_bit_for_bit(tmp_path: Path, assert_same: Any) -> None:
    found = []
    for held in (False, True):
        made = trainer(gpt2(), tmp_path, fp16=True, use_cpu=False)
        if held:
            search(made, knobs=HELD, tail=None)
        made.train()
        found.append(copy.deepcopy(states(made)))
    assert_same(*found)


def test_the_losses_it_is_told_are_those_that_the_trainer_logs(tmp_path: Path) -> None:
    for options in (
        {"gradient_accumulation_steps": 4, "ragged": True},
        {"gradient_accumulation_steps": 4, "label_smoothing_factor": 0.1},
        {},
    ):
        made = trainer(gpt2(dropout=0.0), tmp_path, logging_steps=1, **options)
        callback = search(made, window=5, guard=None)
        made.train()
        assert callback.search is not None
        logged = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
        for number, record in enumerate(callback.search.history):
            assert record.loss == pytest.approx(sum(logged[5 * number : 5 * number + 5]) / 5, abs=1e-5)


def test_gradients_are_compared_as_they_were_before_clipping(tmp_path: Path) -> None:
    found = []
    for most in (0.0, 1e-3):
        options = {"max_steps": 40, "learning_rate": 1e-5, "max_grad_norm": most}
        made = trainer(gpt2(), tmp_path, gradient_accumulation_steps=2, ragged=True, **options)
        callback = search(made, window=20, exclude=["learning_rate", "weight_decay"])
        made.train()
        assert callback.search is not None
        found.append(callback.search.history.windows[0].estimates["dropout"]["t"])
    assert abs(found[0]) > 1.0
    assert found[1] == pytest.approx(found[0], rel=0.1)  # 1.09 and 1.14; 0.77 where the last gradient is seen clipped


def test_the_probe_is_the_trainers_collator_and_loss_on_held_out_data(tmp_path: Path) -> None:
    for smoothing in (0.0, 0.2):
        made = trainer(gpt2(), tmp_path, gradient_accumulation_steps=4, label_smoothing_factor=smoothing)
        probe = integration.probe_of(made, made.eval_dataset)
        before = torch.get_rng_state()
        batches = probe.draw(0)
        assert torch.equal(torch.get_rng_state(), before)
        assert len(batches) == 8
        assert all(batch["input_ids"].shape == (4, 32) for batch in batches)
        losses = probe.measure(made.model, 0)
        made.model.eval()
        expected = [made.model(**batch).loss.item() for batch in batches]
        assert losses.tolist() == pytest.approx(expected, rel=1e-6)
        again = probe.draw(0)
        assert all(torch.equal(one["input_ids"], two["input_ids"]) for one, two in zip(batches, again, strict=True))
        assert not torch.equal(probe.draw(1)[0]["input_ids"], batches[0]["input_ids"])


def chained(model: torch.nn.Module) -> hdet.ChainedOptimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    rest = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    first = torch.optim.SGD(matrices, lr=0.05, momentum=0.9, weight_decay=1e-3)
    return hdet.ChainedOptimizer(first, torch.optim.AdamW(rest, lr=1e-3))


@pytest.mark.parametrize(
    ("stop", "optimizer", "rates"),
    [(7, None, "together"), (10, None, "together"), (7, chained, "together"), (7, None, "matrices")],
)
def test_a_resume_is_the_same_run_bit_for_bit(
    stop: int, optimizer: Callable[[Any], Any] | None, rates: str, tmp_path: Path, assert_same: Any
) -> None:
    options = {"gradient_accumulation_steps": 2, "warmup_steps": 3, "save_strategy": "steps", "save_steps": stop}
    whole = trainer(gpt2(), tmp_path, **options)
    resumed = trainer(gpt2(), tmp_path, **options)
    for made in (whole, resumed) if optimizer is not None else ():
        made.optimizer = optimizer(made.model)
    first = search(whole, rates=rates)
    whole.train()
    second = search(resumed, rates=rates)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop}"))
    assert_same(states(whole), states(resumed))
    assert first.search is not None
    assert second.search is not None
    assert first.search.shifts == second.search.shifts
    assert own_logs(resumed) == own_logs(whole)
    assert (len(second.search.shifts) > 5) == (rates == "matrices")


def test_a_checkpoint_that_is_made_at_a_signal_holds_the_search(tmp_path: Path, assert_same: Any) -> None:
    """The Trainer tells callbacks of no saving then."""
    from transformers import TrainerCallback

    class Signalled(TrainerCallback):  # type: ignore[misc]
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 6:
                callbacks = {type(one).__name__: one for one in made[1].callback_handler.callbacks}
                callbacks["JITCheckpointCallback"].jit_manager._enable_checkpoint()

    made, searches = [], []
    for options in ({}, {"enable_jit_checkpoint": True}, {}):
        made.append(trainer(gpt2(dropout=0.0), tmp_path, gradient_accumulation_steps=2, **options))
        searches.append(search(made[-1]))
    made[0].train()
    made[1].add_callback(Signalled())
    made[1].train()
    assert "_save_checkpoint" not in vars(made[1])
    made[2].train(resume_from_checkpoint=True)
    assert_same(states(made[0]), states(made[2]))
    assert searches[0].search.shifts == searches[2].search.shifts


def test_a_checkpoint_without_a_search_begins_one_and_says_so(tmp_path: Path) -> None:
    plain = trainer(gpt2(), tmp_path, save_strategy="steps", save_steps=8)
    plain.train()
    resumed = trainer(gpt2(), tmp_path, save_strategy="steps", save_steps=8)
    callback = search(resumed)
    with pytest.warns(UserWarning, match="does not exist, so the search begins at step 8 with nothing learned"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert callback.search is not None
    assert callback.search.engine.total_steps == 12
    again = trainer(gpt2(), tmp_path)
    taken_up = search(again)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-16"))
    assert taken_up.search is not None
    assert taken_up.search.shifts == callback.search.shifts


def test_a_file_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    made = trainer(gpt2(), tmp_path, save_strategy="steps", save_steps=5)
    search(made)
    made.train()
    (tmp_path / "checkpoint-5" / "hdet.pt").replace(tmp_path / "checkpoint-10" / "hdet.pt")
    again = trainer(gpt2(), tmp_path)
    search(again)
    with pytest.raises(CheckpointError, match=r"after step 5, and the Trainer goes on from step 10"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))


def test_a_run_that_is_over_is_taken_up_as_without_a_search(tmp_path: Path) -> None:
    """As by a job that is queued anew; the Trainer's own schedule ends at a rate of 0."""
    options = {"save_strategy": "steps", "save_steps": 20, "lr_scheduler_type": "linear"}
    made = trainer(gpt2(), tmp_path, **options)
    first = search(made)
    made.train()
    assert first.search is not None
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-20"))
    assert first.search is None
    again = trainer(gpt2(), tmp_path, **options)
    callback = search(again)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-20"))
    assert again.state.global_step >= 20
    assert callback.search is None


def test_a_search_that_was_cut_short_is_told_by_its_file(tmp_path: Path) -> None:
    made = trainer(gpt2(), tmp_path, save_strategy="steps", save_steps=10)
    search(made)
    made.train()
    file = tmp_path / "checkpoint-10" / "hdet.pt"
    file.write_bytes(file.read_bytes()[:100])
    again = trainer(gpt2(), tmp_path)
    search(again)
    with pytest.raises(CheckpointError, match=r"hdet\.pt cannot be read: .*; resume from another checkpoint folder"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))


def test_nothing_stays_after_an_early_end(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Early(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 6

    made = trainer(gpt2(), tmp_path)
    callback = search(made)
    made.add_callback(Early())
    made.train()
    assert callback.search is not None
    assert callback.search.engine.step_count == 6
    assert not made.model._forward_hooks
    assert made.lr_scheduler.get_last_lr()[0] == made.optimizer.param_groups[0]["lr"]
    assert [module.p for module in made.model.modules() if isinstance(module, nn.Dropout)] == [0.1] * 7
    made.train()  # a second run begins a search of its own
    assert callback.search.engine.step_count == 6


@pytest.mark.parametrize("where", ["on_step_end", "training_step"])
def test_an_interrupt_leaves_nothing_that_changes_what_is_trained_afterwards(
    where: str, tmp_path: Path, assert_same: Any
) -> None:
    """As in a notebook, where the next Trainer is given the same model."""
    from transformers import TrainerCallback

    class Interrupted(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if where == "on_step_end" and state.global_step == 6:
                raise KeyboardInterrupt

    def interrupt(*_: Any) -> None:
        if made.state.global_step == 6:
            raise KeyboardInterrupt

    made = trainer(gpt2(), tmp_path / "first")
    callback = search(made, knobs=[hdet.Dropout(initial_shift=1.0)])
    made.add_callback(Interrupted())
    if where == "training_step":
        made.model.lm_head.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert callback.search.attached is (where == "on_step_end")
    if where == "training_step":
        made.model.lm_head._forward_hooks.clear()
    plain = copy.deepcopy(made.model)
    for model, folder in ((made.model, "second"), (plain, "third")):
        trainer(model, tmp_path / folder).train()
    assert_same(made.model.state_dict(), plain.state_dict())
    assert not callback.search.attached
    assert not made.model._forward_pre_hooks


@pytest.mark.parametrize("held", [b"no file of torch's", {"step": 5}, torch.ones(3)])
def test_a_file_that_holds_no_search_is_refused_by_name(held: Any, tmp_path: Path) -> None:
    made = trainer(gpt2(), tmp_path, save_strategy="steps", save_steps=10)
    search(made)
    made.train()
    file = tmp_path / "checkpoint-10" / "hdet.pt"
    if isinstance(held, bytes):
        file.write_bytes(held)
    else:
        torch.save(held, file)
    again = trainer(gpt2(), tmp_path)
    search(again)
    with pytest.raises(CheckpointError, match=r"hdet\.pt (cannot be read|holds no search of the Trainer's)"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))


def test_a_probe_that_is_the_training_data_is_warned_of(tmp_path: Path) -> None:
    made = trainer(gpt2(), tmp_path)
    made.add_callback(hdet.transformers.Search(probe=made.train_dataset))
    with pytest.warns(UserWarning, match="the probe is the data that the model trains on"):
        made.train()


def test_a_trainer_is_needed(tmp_path: Path) -> None:
    made = trainer(gpt2(), tmp_path)
    callback = hdet.transformers.Search(probe=Text("test", 16))
    with pytest.raises(ConfigError, match=r"there is hdet\.attach"):
        callback.on_train_begin(made.args, made.state, made.control)
    with pytest.raises(ConfigError, match="the probe's data hold 1 examples"):
        integration.probe_of(made, Text("test", 1))
    with pytest.raises(ConfigError, match="a search judges by held-out data"):
        integration.probe_of(made, None)


def test_a_stream_is_judged_by_what_it_gives(tmp_path: Path) -> None:
    """Whether it has a length, and an attribute of the name under which Accelerate's share of a stream holds it."""

    class Stream(IterableDataset):  # type: ignore[misc]
        def __init__(self, dataset: Any) -> None:
            self.dataset = dataset

        def __iter__(self) -> Any:
            return ({name: 0 * value + 7 for name, value in self.dataset[0].items()} for _ in self.dataset.tokens)

    class Sized(Stream):
        def __len__(self) -> int:
            return len(self.dataset)

    made = trainer(gpt2(), tmp_path)
    for kind in (Stream, Sized):
        drawn = integration.probe_of(made, kind(made.eval_dataset)).draw(0)
        assert len(drawn) == 8
        assert all((batch["input_ids"] == 7).all() for batch in drawn)


def test_a_stream_that_gives_examples_by_index_too_is_judged_by_all_of_them(tmp_path: Path) -> None:
    class Indexed(IterableDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> Any:
            return {"input_ids": torch.full((8,), index), "labels": torch.full((8,), index)}

        def __iter__(self) -> Any:
            return map(self.__getitem__, range(len(self)))

    drawn = integration.probe_of(trainer(gpt2(), tmp_path), Indexed()).draw(0)
    assert max(int(batch["input_ids"].max()) for batch in drawn) > 500


def test_a_trainer_that_writes_checkpoints_by_code_of_its_own_has_the_search_in_them(tmp_path: Path) -> None:
    class Own(Trainer):  # type: ignore[misc]
        def _maybe_log_save_evaluate(self, *arguments: Any, **keywords: Any) -> None:
            if self.control.should_save:
                (Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}").mkdir()
                self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    made = trainer(gpt2(), tmp_path, kind=Own, save_strategy="steps", save_steps=8)
    search(made)
    made.train()
    assert (tmp_path / "checkpoint-8" / "hdet.pt").exists()


def test_sub_batches_may_be_as_large_as_a_training_batch(tmp_path: Path) -> None:
    """As a loss needs it that compares the examples of a batch."""
    made = trainer(gpt2(), tmp_path)
    probe_of = integration.probe_of
    drawn = [
        [len(batch["input_ids"]) for batch in probe_of(made, made.eval_dataset, size).draw(0)] for size in (None, 8, 20)
    ]
    assert drawn == [8 * [1], 8 * [8], 3 * [20]]
    with pytest.raises(ConfigError, match="too few for 2 sub-batches of 33; give at least 66"):
        probe_of(made, made.eval_dataset, 33)
    with pytest.raises(ConfigError, match="sub_batch_size must be at least 1"):
        hdet.transformers.Search(probe=made.eval_dataset, sub_batch_size=0)
    with pytest.raises(ConfigError, match=r"hdet.Probe brings its own batches"):
        hdet.transformers.Search(probe=probe_of(made, made.eval_dataset), sub_batch_size=8)
    callback = search(made, sub_batch_size=8)
    made.train()
    assert callback.search is not None
    assert callback.search.finished


def test_batch_norm_is_told_how_to_have_sub_batches_as_large_as_training(tmp_path: Path) -> None:
    """An eighth of a step's examples is by default too few to normalise by."""

    class Digits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = nn.BatchNorm2d(1), nn.Linear(16, 2)

        def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.out(self.norm(pixel_values).flatten(1)), labels)}

    def lit(count: int) -> list[dict[str, Any]]:
        """Bright ones and dark ones, which one alone does not tell once it is normalised by itself."""
        labels = [index % 2 for index in range(count)]
        return [{"pixel_values": torch.randn(1, 4, 4) + 3.0 * label, "labels": label} for label in labels]

    def told(size: int | None) -> list[str]:
        torch.manual_seed(0)
        made = trainer(Digits(), tmp_path, max_steps=40, learning_rate=0.02)
        made.train_dataset = lit(64)
        made.add_callback(hdet.transformers.Search(probe=lit(128), sub_batch_size=size, quiet=True))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made.train()
        return [str(one.message) for one in caught if "statistics of each of its batches" in str(one.message)]

    (said,) = told(None)
    assert "sub_batch_size=" in said
    assert not told(8)


def test_the_probe_may_be_named_as_the_evaluation_data_are(tmp_path: Path) -> None:
    held_out = Text("test", 16)
    made = trainer(gpt2(), tmp_path)
    probe_of = integration.probe_of
    with pytest.raises(ConfigError, match=r"no data called 'code'; there are \[\]"):
        probe_of(made, "code")
    made.eval_dataset = {"prose": Text("train", 16), "code": held_out}
    with pytest.raises(ConfigError, match=r"no data called 'cod'; there are \['code', 'prose'\]"):
        probe_of(made, "cod")
    for of in (probe_of, integration.objective_of):
        named, given = ([one["input_ids"].tolist() for one in of(made, data).draw(3)] for data in ("code", held_out))
        assert named == given


class Counting(Trainer):  # type: ignore[misc]
    """Gathers metrics in `compute_loss`, and hands them over as it logs, as TRL's trainers do."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.counted: dict[str, dict[str, list[int]]] = {"train": {}, "eval": {}}
        super().__init__(*arguments, **keywords)

    def compute_loss(self, model: nn.Module, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        self.counted["train" if model.training else "eval"].setdefault("batches", []).append(1)
        return super().compute_loss(model, inputs, *arguments, **keywords)

    def log(self, logs: dict[str, Any], *arguments: Any, **keywords: Any) -> None:
        own = self.counted["train" if self.model.training else "eval"]
        super().log(logs | {name: len(noted) for name, noted in own.items()}, *arguments, **keywords)
        own.clear()


def test_metrics_of_a_trainer_of_the_users_own_are_those_without_it(tmp_path: Path) -> None:
    found = []
    for held in (False, True):
        options = {"eval_strategy": "steps", "eval_steps": 5, "logging_steps": 5}
        made = trainer(gpt2(), tmp_path, kind=Counting, **options)
        if held:
            search(made, knobs=HELD, tail=None, window=5)
        made.train()
        assert not any("batches" in entry for entry in made.state.log_history if "hdet/now/learning_rate" in entry)
        found.append([entry["batches"] for entry in made.state.log_history if "batches" in entry])
    assert found[0] == found[1]
    assert len(found[0]) >= 8


class Noting(Trainer):  # type: ignore[misc]
    """Notes its losses in other ways than by lists, and logs them itself."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.sum, self.sums = torch.zeros(()), {"loss": torch.zeros(())}
        self.last: deque[float] = deque(maxlen=100)
        self.count: Counter[str] = Counter()
        super().__init__(*arguments, **keywords)

    def compute_loss(self, model: nn.Module, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        loss = super().compute_loss(model, inputs, *arguments, **keywords)
        self.sum += loss.detach()
        self.sums["loss"] += loss.detach()
        self.last.append(loss.item())
        self.count["passes"] += 1
        noted = {"sum": self.sum.item(), "sums": self.sums["loss"].item(), "last": list(self.last), **self.count}
        self.log({"noted": noted})
        return loss


def test_what_a_trainer_of_the_users_own_notes_and_logs_of_its_losses_is_of_training(tmp_path: Path) -> None:
    found = []
    for held in (False, True):
        made = trainer(gpt2(), tmp_path, kind=Noting)
        if held:
            search(made, knobs=HELD, tail=None, window=5)
        made.train()
        found.append([entry["noted"] for entry in made.state.log_history if "noted" in entry])
    assert found[0] == found[1]
    assert len(found[0]) == 20


class Normalising(Trainer):  # type: ignore[misc]
    """Divides its loss by a mean that this loss has just moved."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.mean, self.means = torch.full((), 5.0), {"of": torch.full((), 5.0)}
        super().__init__(*arguments, **keywords)

    def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
        loss = super().compute_loss(*arguments, **keywords)
        for mean in (self.mean, self.means["of"]):
            mean.mul_(0.9).add_(0.1 * loss.detach())
            loss = 2.0 * loss / mean
        return loss


def test_a_loss_that_reads_what_it_has_just_noted_in_a_tensor_is_differentiated(tmp_path: Path) -> None:
    made = trainer(gpt2(), tmp_path, kind=Normalising, gradient_accumulation_steps=4, max_steps=30, examples=84)
    callback = search(made, tail=None, window=5)
    made.train()
    assert callback.search is not None
    assert callback.search.finished


def summed(outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
    """For `compute_loss_func`, to which the Trainer's evaluation tells the number of a batch's items, too."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


class Dividing(Trainer):  # type: ignore[misc]
    """The same, as a subclass has it."""

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, *, num_items_in_batch: Any
    ) -> Any:
        outputs = model(**inputs)
        loss = summed(outputs, inputs["labels"], num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


def patched(**given: Any) -> Trainer:
    """The same, as a loss that is set on the Trainer itself has it."""
    made = Trainer(**given)
    made.compute_loss = partial(Dividing.compute_loss, made)
    return made


@pytest.mark.parametrize("kind", [partial(Trainer, compute_loss_func=summed), Dividing, patched])
def test_a_loss_that_divides_by_the_items_of_a_batch_is_judged_by_theirs(
    kind: Any, tmp_path: Path, assert_same: Any
) -> None:
    options: dict[str, Any] = {"kind": kind, "gradient_accumulation_steps": 2, "ragged": True}
    plain = trainer(gpt2(), tmp_path, **options)
    plain.train()
    made = trainer(gpt2(), tmp_path, **options)
    callback = search(made, knobs=HELD, tail=None, window=5)
    made.train()
    assert_same(states(made), states(plain))
    assert callback.search is not None
    assert callback.search.finished
    for averaged, of in product((True, False), ("probe_of", "objective_of")):
        made.args.average_tokens_across_devices = averaged
        judged = getattr(integration, of)(made, made.eval_dataset)
        batch = judged.draw(0)[0]
        made.model.eval()
        with torch.no_grad():
            expected = summed(made.model(**batch), batch["labels"], made._get_num_items_in_batch([batch], "cpu"))
            assert judged.loss(made.model, dict(batch)).item() == pytest.approx(expected.item(), rel=1e-6)
        assert made.args.average_tokens_across_devices is averaged


class Averaging(Trainer):  # type: ignore[misc]
    """Does not read the number of items, cannot be judged outside of training, and counts its calls."""

    calls = 0

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        self.calls += 1
        embedded = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
        loss = model(inputs_embeds=embedded, labels=inputs["labels"]).loss
        (gradient,) = torch.autograd.grad(loss, embedded, create_graph=True)
        return loss + 1e-3 * gradient.square().sum()


@pytest.mark.parametrize(("accepts", "times"), [(True, 4), (False, 1)])
def test_a_loss_that_ignores_the_items_of_a_batch_is_told_too_large_until_the_trainer_knows(
    accepts: bool, times: int, tmp_path: Path
) -> None:
    """And it is called for training alone, once a micro-batch, where the probe does not use it."""
    made = trainer(gpt2(), tmp_path, kind=Averaging, gradient_accumulation_steps=4, max_steps=10, learning_rate=1e-9)
    assert made.model_accepts_loss_kwargs
    made.model_accepts_loss_kwargs = accepts
    batches = [{"input_ids": tokens, "labels": tokens} for tokens in Text("test", 32).tokens.split(8)]
    probe = hdet.Probe(lambda model, batch: model(**batch).loss, batches)
    callback = hdet.transformers.Search(probe=probe, knobs=HELD, tail=None, window=5)
    made.add_callback(callback)
    made.train()
    assert made.calls == 4 * 10
    assert callback.search is not None
    told = [record.loss for record in callback.search.history]
    assert told == pytest.approx([times * math.log(256)] * 2, rel=0.05)  # of a model that knows nothing


def test_an_optimizer_of_transformers_own_that_hdet_does_not_know_trains(tmp_path: Path) -> None:
    made = trainer(gpt2(), tmp_path, optim="adafactor", max_steps=80)
    callback = search(made)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "hdet does not know how Adafactor")
        made.train()
    assert callback.search is not None
    assert callback.search.finished


def test_trials_of_the_trainers_own_search_and_copies_on_devices_are_refused(tmp_path: Path) -> None:
    def made(folder: str) -> Trainer:
        one = trainer(gpt2(), tmp_path / folder)
        one.add_callback(hdet.transformers.Search(probe=Text("test", 16)))
        return one

    with pytest.raises(ConfigError, match="hyperparameter_search, which keeps each trial's checkpoints"):
        made("trial").train(trial={"learning_rate": 1e-3})
    copied = made("copied")
    copied.args._n_gpu = 2
    with pytest.raises(ConfigError, match="copies the model to 2 devices by DataParallel"):
        copied.train()
