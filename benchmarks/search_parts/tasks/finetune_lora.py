"""A pretrained byte GPT, fine-tuned: adapters of low rank alone."""

from search_parts.finetuning import FineTuningTask
from search_parts.task import DECAYS, DROPOUTS, LEARNING_RATES, Grid, doubling

TASK = FineTuningTask(
    name="finetune_lora",
    title="Fine-tuning, low-rank adapters (AdamW)",
    steps=300,
    batch=16,
    family="adamw",
    ignorance=2.237,  # of the pretrained weights: a run that ends above it has lost what they knew
    grid=Grid(doubling(2e-3, 6), (0.1,), (0.0, 0.1)),
    starts=LEARNING_RATES + DECAYS + DROPOUTS,
    micro_batches=4,
    clip=1.0,
    low_rank=True,
)
