"""What every process of a run must declare alike, because each decides by itself."""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor

from hdet.engine.plan import Plan
from hdet.hparams.schedule import sampled
from hdet.signals import Probe
from hdet.spec import Spec


def declaration(plan: Plan) -> dict[str, str]:
    """By name and as text, what every process of a run must declare alike, because each decides by itself."""
    signal = plan.signal
    return {
        "knobs": _told(_rounded([_in_full(knob.spec) for knob in plan.knobs])),
        "bases": _told([knob.schedule(0) for knob in plan.knobs]),
        "schedules": _told(_rounded([[float(value) for value in sampled(knob.schedule)] for knob in plan.knobs])),
        "evidence": _told(_rounded([_in_full(source) for source in plan.evidence])),
        "signal": f"probe at {signal.at}, stride {signal.stride}" if isinstance(signal, Probe) else "training loss",
        "merge": _told(plan.merge.to_dict()),
        "window": _told(plan.windows.to_dict()),
        "gradients": plan.gradients,
        "seed": str(plan.seed),
        "total_steps": str(plan.total_steps),
        "guard": _told(plain(plan.guard)),
        "tail": _told(plain(plan.tail)),
        "noise_scale": str(plan.noise_scale),
        "optimizer's groups": _told(_settings(plan)),
    }


def _rounded(value: Any) -> Any:
    """Plain data whose floats are text, of as many digits as processors round alike where a scheduler follows."""
    if isinstance(value, dict):
        return {key: _rounded(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(held) for held in value]
    return f"{value:.6g}" if isinstance(value, float) else value


def _settings(plan: Plan) -> list[dict[str, object]]:
    """What the optimizer's groups hold beside their parameters and the values that knobs write."""
    optimizer = plan.replicas.hosts[0][1]
    written = frozenset(target for knob in plan.knobs for target in knob.bindings[0].targets)

    def told(index: int, key: str, value: object) -> object:
        if (id(optimizer), index, key, None) in written:
            return "a knob's"
        if isinstance(value, (tuple, list)):
            return ["a knob's" if (id(optimizer), index, key, i) in written else v for i, v in enumerate(value)]
        if isinstance(value, Tensor):
            return value.tolist() if value.numel() == 1 else list(value.shape)
        return value if isinstance(value, (int, float, str, type(None))) else type(value).__name__

    return [
        {key: told(index, key, value) for key, value in group.items() if key != "params"}
        for index, group in enumerate(optimizer.param_groups)
    ]


def plain(spec: Spec | None) -> object:
    """A declaration as plain data; its kind and label where a function is among the fields: it has no common text."""
    if spec is None:
        return None
    try:
        return spec.to_dict()
    except ValueError:
        return f"{spec.kind} {getattr(spec, 'label', '')}".strip()


def _in_full(spec: Spec) -> object:
    """A declaration as plain data; of a field that has no common text, as a function, that it is given."""
    try:
        return spec.to_dict()
    except ValueError:
        return {"kind": spec.kind, **{name: _field(spec, name) for name in type(spec).model_fields}}


def _field(spec: Spec, name: str) -> object:
    value = getattr(spec, name)
    if isinstance(value, Spec):
        return _in_full(value)
    try:
        return spec.model_dump(mode="json", include={name})[name]
    except ValueError:
        return "given"


def _told(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)
