"""What a task works with: a loaded model, a quantizer fitted to it, texts, and the cache's options."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.configuration import CacheConfig
from kvbench.kernels.formats import CacheFormat
from kvbench.quantizer import Quantizer

if TYPE_CHECKING:
    from kvbench.corpora import Corpus
    from kvbench.models import LoadedModel


@dataclass
class Session:
    """One quantizer on one model."""

    loaded: "LoadedModel"
    quantizer: Quantizer
    format: CacheFormat
    corpus: "Corpus"
    cache: CacheConfig
    backend: str = "reference"
