"""A user's own task: any function that returns a `Workload`, named `module:function`."""

from __future__ import annotations

from inspect import signature
from typing import Any

from pydantic import Field

from hdet.app.modules import imported
from hdet.app.tasks.task import Task, Workload, whole
from hdet.errors import ConfigError
from hdet.spec import meant, register


@register
class Imported(Task):
    """The workload of the user's own function, called as `function(seed=, batch_size=, device=, **options)`.

    Attributes:
        path: `module:function`; the module must be importable (`hdet run` adds the working directory).
        options: further keyword arguments of the function, plain numbers and strings.
    """

    path: str = Field(pattern=r"^[\w.]+:\w+$", kw_only=False)
    options: dict[str, Any] = Field(default_factory=dict)

    def build(self, *, seed: int, batch_size: int, device: str = "cpu") -> Workload:
        module_name, function_name = self.path.split(":")
        module = imported(module_name, asked_by=f"task {self.path!r}")
        function = getattr(module, function_name, None)
        if function is None:
            near = meant(function_name, vars(module))
            raise ConfigError(f"task {self.path!r}: module {module_name!r} has no {function_name!r}{near}")
        given = {"seed": seed, "batch_size": batch_size, "device": device, **self.options}
        try:
            signature(function).bind(**given)
        except TypeError as error:
            raise ConfigError(f"task {self.path!r} is called with {', '.join(given)}=: {error}") from None
        return whole(function(**given), f"task {self.path!r}")
