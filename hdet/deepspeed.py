"""DeepSpeed: what users name of `hdet.integrations.deepspeed`."""

from hdet.integrations.deepspeed import attach

__all__ = ["attach"]
