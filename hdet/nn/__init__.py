"""Modules whose scalars are tensors: they change at every step, per replica, without a recompilation.

| file | holds |
|---|---|
| `knob_tensor.py` | `KnobTensor`, and what a module needs to hold one |
| `dropout.py` | `Dropout`, `Dropout1d`, `Dropout2d`, `Dropout3d` |
| `attention.py` | `attention`, the function, and `Temperature`, the module |
| `multihead_attention.py` | `MultiheadAttention` |
| `loss.py` | `CrossEntropyLoss` |
| `tempered.py` | `temper`: a temperature for modules that call PyTorch's attention themselves |
| `swap.py` | `swap`: all of it in an existing model, in one call |
| `names.py` | module names without the segments of wrappers |
"""

from hdet.nn.attention import Temperature, attention
from hdet.nn.dropout import Dropout, Dropout1d, Dropout2d, Dropout3d
from hdet.nn.knob_tensor import KnobAttribute, KnobModule, KnobTensor, knob_tensors
from hdet.nn.loss import CrossEntropyLoss
from hdet.nn.multihead_attention import MultiheadAttention
from hdet.nn.names import named_modules
from hdet.nn.swap import swap
from hdet.nn.tempered import temper

__all__ = [
    "CrossEntropyLoss",
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "KnobAttribute",
    "KnobModule",
    "KnobTensor",
    "MultiheadAttention",
    "Temperature",
    "attention",
    "knob_tensors",
    "named_modules",
    "swap",
    "temper",
]
