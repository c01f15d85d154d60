"""Windows taken through a controller, as an engine does."""

from __future__ import annotations

from hdet.controllers import Context, Controller, Estimate


def moves(controller: Controller, *windows: tuple[Estimate, Context]) -> list[float]:
    """Its move after each window, from its first state on."""
    state, out = controller.start(), []
    for estimate, context in windows:
        move, state = controller.step(state, estimate, context)
        out.append(move)
    return out
