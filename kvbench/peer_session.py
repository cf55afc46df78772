"""A session on a peer: the same model, texts and attention, the library's own cache in between."""

from functools import partial
from typing import ClassVar

from torch import Tensor

from kvbench.errors import ConfigurationError
from kvbench.packed_cache import PackedCache
from kvbench.peer_cache import PeerCache, peer_compression, prove_peer
from kvbench.peers import PeerQuantizer
from kvbench.session import Session
from kvbench.task import CachePath

FOREIGN_OPTIONS = ("n_sink", "recent_window", "excluded_layers")


class PeerSession(Session):
    """One peer on one model. Options of kvbench's cache that the library's does not have are refused."""

    path: ClassVar[CachePath] = "peer"

    def new_cache(self) -> PackedCache:
        """An empty cache of the library's. Raises ConfigurationError for options that it does not have."""
        assert isinstance(self.quantizer, PeerQuantizer)
        for option in FOREIGN_OPTIONS:
            if value := getattr(self.cache, option):
                raise ConfigurationError(
                    f"cache.{option}={value} is not for quantizer={self.quantizer.name}, which brings its own cache. "
                    "Leave it out."
                )
        make = partial(self.quantizer.new_cache, self.loaded.model)
        return PeerCache(make, self.format, self.loaded.geometry)

    def note(self, cache: PackedCache) -> None:
        if not isinstance(cache, PeerCache):
            return super().note(cache)
        return self._add(prove_peer(cache), peer_compression(cache))

    def given_back(self, cache: PackedCache, layer: int, keys: Tensor) -> Tensor | None:
        if not isinstance(cache, PeerCache):
            return super().given_back(cache, layer, keys)
        return cache.reread(layer, keys.transpose(1, 2)).transpose(1, 2).float()
