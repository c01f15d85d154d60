"""torchft: what users name of `hdet.integrations.torchft`."""

from hdet.integrations.torchft import ManagedEngine, attach, distribute

__all__ = ["ManagedEngine", "attach", "distribute"]
