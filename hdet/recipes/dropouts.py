"""Which dropouts of a model are one hyperparameter: those that were set alike."""

from __future__ import annotations

from collections import defaultdict
from glob import escape
from math import isclose

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from hdet.hparams import Dropout
from hdet.hparams.binding import ModelBinding
from hdet.nn import named_modules

OF_DEPTH = ("drop_prob", "layerdrop")
"""Rates of stochastic depth, as timm and Transformers call them."""

MOST_KNOBS = 4
"""Every further knob costs resolution and memory."""


def by_rate(model: nn.Module) -> dict[float, Dropout]:
    """A knob for the dropouts of each rate, those of most modules first.

    Where all are set alike the one knob is called `dropout`; else each bears its rate, as in `dropout[0.05]`.

    Raises:
        ConfigError: no dropout of this model can be explored.

    >>> model = nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 2), nn.Dropout(0.1), nn.Dropout(0.05))
    >>> {rate: (knob.label, knob.pattern) for rate, knob in by_rate(model).items()}
    {0.1: ('dropout[0.1]', ('0', '2')), 0.05: ('dropout[0.05]', ('3',))}
    """
    everything = Dropout()
    modules: dict[float, list[str]] = defaultdict(list)
    for name, cell in everything.cells(model, "*").items():
        rate = ModelBinding([cell], everything.bounds).read()
        modules[rate].append(escape(name.rpartition(".")[0]))
    if len(modules) == 1:
        return dict.fromkeys(modules, everything)
    short = [f"{rate:g}" for rate in modules]
    # 0.3 and 3 * 0.1 are two numbers that print alike.
    called = {rate: one if short.count(one) == 1 else repr(rate) for rate, one in zip(modules, short, strict=True)}
    return {
        rate: Dropout(pattern=tuple(names), name=f"dropout[{called[rate]}]")
        for rate, names in sorted(modules.items(), key=lambda found: -len(found[1]))
    }


def plain_numbers(model: nn.Module) -> dict[str, list[str]]:
    """Dropout rates that a module's forward reads from a float of its own, which no knob writes: modules by attribute.

    So in most language models of Transformers: `attention_dropout` is passed to a function. Stochastic depth is among
    them.
    """
    found: dict[str, list[str]] = defaultdict(list)
    made = [module.p for _, module in named_modules(model) if isinstance(module, _DropoutNd)]
    for name, module in named_modules(model):
        if isinstance(module, _DropoutNd):
            continue
        for attribute, value in vars(module).items():
            if isinstance(value, float) and 0.0 < value < 1.0:
                # A `drop_rate`, as timm calls it, may be read by the forward, or be what a dropout was made with.
                own = attribute == "drop_rate" and not any(isclose(rate, value, rel_tol=1e-6) for rate in made)
                if "dropout" in attribute or attribute in OF_DEPTH or own:
                    found[attribute].append(name)
                elif attribute == "p" and type(module).__name__ == "StochasticDepth":  # torchvision's
                    found["stochastic_depth"].append(name)
    return dict(found)
