"""A byte GPT of one block, 0.03 million parameters, whose attention is easily ruined in the first steps, with AdamW."""

from search_parts.task import SIZES, Grid, doubling
from search_parts.text import IGNORANCE, TextTask

TASK = TextTask(
    name="text_tiny",
    title="Byte GPT of one block (AdamW)",
    steps=800,
    batch=16,
    family="adamw",
    ignorance=IGNORANCE,
    grid=Grid(doubling(0.00125, 6), (0.1,)),
    starts=SIZES,
    development=True,
    width=32,
    depth=1,
    heads=2,
    context=32,
)
