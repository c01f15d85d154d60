"""Lightning: what users name of `hdet.integrations.lightning`."""

from hdet.integrations.lightning import Search

__all__ = ["Search"]
