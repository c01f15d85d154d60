"""The planned value of a knob at each optimizer step."""

from hdet.hparams.schedule import (
    WSD,
    Constant,
    Cosine,
    FromCallable,
    HeldOneCycle,
    LinearDecay,
    LinearWarmup,
    OneCycle,
    Replay,
    Schedule,
)

__all__ = [
    "WSD",
    "Constant",
    "Cosine",
    "FromCallable",
    "HeldOneCycle",
    "LinearDecay",
    "LinearWarmup",
    "OneCycle",
    "Replay",
    "Schedule",
]
