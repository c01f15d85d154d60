"""A larger byte GPT, on streaming text with AdamW."""

from search_parts.task import ALL_OFF, DECAYS, LEARNING_RATES, Grid, doubling
from search_parts.text import IGNORANCE, TextTask

TASK = TextTask(
    name="text_large",
    title="Byte GPT, larger (AdamW)",
    steps=600,
    batch=16,
    family="adamw",
    ignorance=IGNORANCE,
    grid=Grid(doubling(5e-4, 7), (0.1,)),
    starts=LEARNING_RATES + DECAYS + ALL_OFF,
    clip=1.0,
    width=96,
    depth=3,
)
