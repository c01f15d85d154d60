"""Lightning Fabric: what users name of `hdet.integrations.fabric`."""

from hdet.integrations.fabric import attach

__all__ = ["attach"]
