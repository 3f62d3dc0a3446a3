"""One decoder and its parts."""

from air_hpc.models.init import initialize, on_meta
from air_hpc.models.llama import Llama

__all__ = ["Llama", "initialize", "on_meta"]
