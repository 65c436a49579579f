"""Sending an exported model to a model hub."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from tfive.errors import RunFailed, UserError

UNREACHABLE: tuple[type[Exception], ...] = (HfHubHTTPError.__bases__[0], OSError)
"""What goes wrong on the way: the base class of the library's own transport, whichever its version has."""


def check_repo(repo: str) -> None:
    """Refuse a name that no hub takes, before anything is written."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"--push {repo}: not the name of a repository; give one such as you/model") from error


def push(folder: Path, repo: str) -> str:
    """Upload a folder to a repository of the hub, a new private one where there is none; returns its address."""
    api = huggingface_hub.HfApi()
    try:
        address = str(api.create_repo(repo, private=True, exist_ok=True))
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Exported by tfive")
    except UNREACHABLE as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RunFailed(
            f"{folder} is written, but could not be pushed to {repo}: {reason[:200]}; log in with hf auth login, then: "
            f"hf upload {repo} {folder}"
        ) from error
    return address
