"""The small byte GPT with SGD and momentum."""

from search_parts.task import ALL_OFF, DECAYS, LEARNING_RATES, Grid, doubling
from search_parts.text import IGNORANCE, TextTask

TASK = TextTask(
    name="text_momentum",
    title="Byte GPT, small (SGD with momentum)",
    steps=600,
    batch=16,
    family="sgd",
    ignorance=IGNORANCE,
    grid=Grid(doubling(0.02, 9), (1e-4,)),
    starts=LEARNING_RATES + DECAYS + ALL_OFF,
    clip=1.0,
    development=True,
    width=48,
    depth=2,
)
