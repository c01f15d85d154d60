"""The training loss as a signal: free, unpaired, and blind to what biases it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingLoss:
    """Each replica's mean training loss over the window: the paper's signal.

    Its noise is that of different batches, and a knob that changes the training loss by construction (dropout,
    label smoothing, temperature) cannot be judged by it.
    """
