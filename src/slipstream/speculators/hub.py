"""Speculator folders to and from the hub, and the drafter that such a folder makes.

What is fetched is data: nothing of a folder is executed here.
"""

from pathlib import Path
from pkgutil import resolve_name

from slipstream.core.errors import InputError, first_sentence
from slipstream.speculators.base import DraftingSpeculator, speculator_class
from slipstream.speculators.checkpoint import located, read_config


def from_pretrained(name: str | Path):
    """A drafter with the speculator called `name`: a folder, a hub id, or one that ships.

    Its settings are those with which training measured tau. Raises `InputError` for what is no
    folder of a speculator that drafts.
    """
    kind = speculator_class(read_config(located(name))["kind"])
    if not issubclass(kind, DraftingSpeculator):
        raise InputError(
            f"speculator: {name} holds a speculator of kind {kind.kind!r}, which does not draft; "
            "give one that train.py wrote with speculator=streaming or speculator=medusa"
        )
    return resolve_name(kind.drafter_class)(name)


def push_to_hub(folder: str | Path, repo_id: str, private: bool | None = None) -> str:
    """Upload the speculator in `folder` to the hub as `repo_id` (OWNER/NAME), made if missing;
    returns its address.

    private: whether a new one is, None for the owner's default. Raises `InputError` for a folder
    that is no speculator, and where the hub does not take it.
    """
    from huggingface_hub import HfApi

    folder, api = located(folder), HfApi()
    read_config(folder)
    try:
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo_id, folder_path=folder, commit_message="Upload with Slipstream"
        )
    except (OSError, ValueError) as error:  # theirs, and those of requests, are such
        raise InputError(
            f"repo_id: {folder} cannot be uploaded as {repo_id!r} ({first_sentence(error)}); log "
            "in with hf auth login, and give OWNER/NAME of a place where you may write"
        ) from error
    return str(address)
