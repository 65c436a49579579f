"""Whether the model hub can be asked at all: libraries try for half a minute, several times a start."""

from __future__ import annotations

import functools
import socket
import urllib.parse
import urllib.request
from typing import Any

from huggingface_hub import constants, try_to_load_from_cache

from tfive.errors import UserError
from tfive.models.folder import CONFIG


def hub_options(source: str, revision: str | None = None) -> dict[str, Any]:
    """Options with which the hub id `source` is loaded: where the hub's name leads nowhere, from the local cache alone.
    A model that is not there either is refused at once."""
    host = urllib.parse.urlsplit(constants.ENDPOINT).hostname or ""
    if constants.HF_HUB_OFFLINE or urllib.request.getproxies() or _leads_somewhere(host):
        return {}
    if isinstance(try_to_load_from_cache(source, CONFIG, revision=revision), str):
        return {"local_files_only": True}
    raise UserError(
        f"{source}: there is no such folder, it is not in the local cache, and the model hub ({host}) cannot be found "
        "from here; give a model folder, a .gguf file or nano, or connect to the network"
    )


@functools.cache
def _leads_somewhere(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True
