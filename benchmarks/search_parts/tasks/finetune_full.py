"""A pretrained byte GPT, fine-tuned: all weights."""

from search_parts.finetuning import FineTuningTask
from search_parts.task import DECAYS, DROPOUTS, LEARNING_RATES, Grid, doubling

TASK = FineTuningTask(
    name="finetune_full",
    title="Fine-tuning, all weights (AdamW)",
    steps=300,
    batch=16,
    family="adamw",
    ignorance=2.237,  # of the pretrained weights: a run that ends above it has lost what they knew
    grid=Grid(doubling(2.5e-4, 6), (0.1,), (0.0, 0.1)),
    starts=LEARNING_RATES + DECAYS + DROPOUTS,
    micro_batches=4,
    clip=1.0,
    low_rank=False,
)
