"""Whether what autograd runs is a backward that fills `.grad`, or `torch.autograd.grad`, which leaves it alone."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn


def leaf_below(tensor: Tensor) -> Any:
    """A node by which a tensor's graph fills the gradient of a parameter, or of another leaf if there is none.

    None where the graph has no leaf of its own, as under reentrant activation checkpointing.
    """
    other = None
    seen = set()
    waiting = [tensor.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ != "AccumulateGrad":
            waiting.extend(following for following, _ in node.next_functions)
        elif isinstance(node.variable, nn.Parameter):
            return node
        elif other is None:
            other = node
    return other


def accumulates(leaf: Any) -> bool:
    """Whether the pass through the graph that is under way will fill the gradient of a leaf."""
    if leaf is None:
        return True
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # the answer for a leaf whose gradient `torch.autograd.grad` was asked for
        return False


def tells_no_end() -> bool:
    """Whether compiled autograd runs the backward that is under way, and calls nothing back when it is through."""
    return getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False)
