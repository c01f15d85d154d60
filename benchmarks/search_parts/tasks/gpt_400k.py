"""The byte GPT of `text_small` at 0.4 million parameters: does what is found at one size hold at others?"""

from search_parts.task import SIZES, Grid, doubling
from search_parts.text import IGNORANCE, TextTask

TASK = TextTask(
    name="gpt_400k",
    title="Byte GPT, 0.4 million parameters (AdamW)",
    steps=600,
    batch=16,
    family="adamw",
    ignorance=IGNORANCE,
    grid=Grid(doubling(1e-3, 6), (0.1,)),
    starts=SIZES,
    clip=1.0,
    development=True,
    width=88,
    depth=4,
)
