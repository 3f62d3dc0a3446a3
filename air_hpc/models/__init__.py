"""One decoder and its parts."""

from air_hpc.models.decoder import Decoder
from air_hpc.models.init import initialize, on_meta

__all__ = ["Decoder", "initialize", "on_meta"]
