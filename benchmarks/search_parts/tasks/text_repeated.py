"""The small byte GPT on little text, seen many times: regularisation decides."""

from search_parts.task import ALL_OFF, DECAYS, DROPOUTS, LEARNING_RATES, Grid, doubling
from search_parts.text import IGNORANCE, TextTask

TASK = TextTask(
    name="text_repeated",
    title="Byte GPT on repeated text (AdamW)",
    steps=600,
    batch=16,
    family="adamw",
    ignorance=IGNORANCE,
    grid=Grid(doubling(2e-3, 5), (0.01, 0.1, 1.0), (0.0, 0.1, 0.2, 0.3)),
    starts=LEARNING_RATES + DECAYS + DROPOUTS + ALL_OFF,
    micro_batches=4,
    clip=1.0,
    development=True,
    width=48,
    depth=2,
    train_bytes=50_000,
    probe_sequences=2,
)
