"""One quick question to the model hub before anything is loaded from it, so that no network fails in seconds."""

from pathlib import Path
from typing import Literal

PROBE_SECONDS = 10


class HubUnavailable(Exception):
    """The hub does not answer, or refuses; the message says which, in a few words."""


def resolve_revision(repository: str, revision: str | None, kind: Literal["model", "dataset"] = "model") -> str:
    """The commit hash that ``revision`` (default: main) names now.

    The hub's own loaders retry a dead connection for half a minute a file; this asks once. Raises HubUnavailable.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        info = HfApi().repo_info(repository, revision=revision, repo_type=kind, timeout=PROBE_SECONDS)
    except GatedRepoError as error:
        raise HubUnavailable("access is gated") from error
    except RepositoryNotFoundError as error:
        raise HubUnavailable("no such repository, or it is private") from error
    except RevisionNotFoundError as error:
        raise HubUnavailable(f"no revision '{revision}'") from error
    except Exception as error:  # the HTTP client, and so its errors, differ between hub versions
        raise HubUnavailable(f"the hub cannot be reached ({type(error).__name__})") from error
    return info.sha or revision or "main"


def cached_revision(repository: str, revision: str | None) -> str | None:
    """The commit that ``revision`` (default: main) named when the model was last downloaded here, or None."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repository, "config.json", revision=revision)
    return Path(found).parent.name if isinstance(found, str) else None
