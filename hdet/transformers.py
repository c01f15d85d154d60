"""Hugging Face Transformers: what users name of `hdet.integrations.transformers`."""

from hdet.integrations.transformers import Search

__all__ = ["Search"]
