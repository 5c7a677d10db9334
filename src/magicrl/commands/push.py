"""``magicrl push``: a run's model with its card to a repository of the Hugging Face Hub, or of a server like it."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from rich.console import Console

from magicrl.commands.options import Flag
from magicrl.config.errors import RecipeError
from magicrl_verifiers.secrets import without_secrets

CARD, WEIGHTS = "README.md", ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")


def model_folder(folder: Path) -> Path:
    """The model of a run folder, or the folder itself where it is a model's.

    Raises:
        RecipeError: neither, a run without a model, or a model without its card.
    """
    if (folder / "run.json").is_file():
        if not (folder / "model").is_dir():
            raise RecipeError(f"{folder}: the run has saved no model yet; it does at its end (--resume continues it)")
        folder = folder / "model"
    if not any((folder / name).is_file() for name in WEIGHTS):
        raise RecipeError(f"{folder}: neither a run folder nor a model (no {WEIGHTS[0]})")
    if not (folder / CARD).is_file():
        raise RecipeError(
            f"{folder}: no model card ({CARD}); a model is not shared without one: magicrl train writes it"
        )
    return folder


def push_model(folder: Path, repository: str, *, public: bool, message: str) -> str:
    """Make the repository where it is not there, upload the model and its card in one commit; the commit's address.

    The token is the environment's (``HF_TOKEN``) or the one of ``hf auth login``; it is in no message.

    Args:
        folder: of a run or of a model.
        repository: ``NAME`` or ``OWNER/NAME``.
        public: everybody may read a repository that is made here.
        message: of the commit.

    Raises:
        RecipeError: there is nothing to push, or the repository's name is none.
        RuntimeError: no token, or the hub refuses or cannot be reached.
    """
    import httpx2
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    model = model_folder(folder)
    if get_token() is None:
        raise RuntimeError("no token for the hub: set HF_TOKEN, or log in with: hf auth login")
    hub = HfApi(library_name="magicrl", library_version=importlib.metadata.version("magicrl"))
    try:
        repo = hub.create_repo(repository, private=not public, exist_ok=True)
        commit = hub.upload_folder(repo_id=repo.repo_id, folder_path=model, commit_message=message)
    except HFValidationError as error:
        raise RecipeError(f"{repository}: no name of a repository: {error}") from None
    except (HfHubHTTPError, httpx2.HTTPError, OSError) as error:
        raise RuntimeError(f"{hub.endpoint} did not take the model: {without_secrets(str(error))}") from None
    return str(commit.commit_url)


def push(
    run: Path, repository: str, /, *, public: Flag = False, message: str = "Trained with magicrl", dry_run: Flag = False
) -> int:
    """Push a run's model with its card to a repository of the Hugging Face Hub, in one commit.

    The token is HF_TOKEN, or that of `hf auth login`. HF_ENDPOINT names another server.

    Example: magicrl push runs/quickstart me/quickstart

    Parameters
    ----------
    run
        A run folder, or a folder with a model and its card.
    repository
        NAME or OWNER/NAME; it is made where it is not there.
    public
        A repository that is made here may be read by everybody; default: private.
    message
        Of the commit.
    dry_run
        Show what would be uploaded.
    """
    console = Console(emoji=False, highlight=False)
    folder = model_folder(run)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        line = f"{path.stat().st_size:>16,} bytes  {path.relative_to(folder)}"
        console.print(line, markup=False, soft_wrap=True)
    if dry_run:
        return 0
    console.print(
        f"pushed: {push_model(run, repository, public=public, message=message)}", markup=False, soft_wrap=True
    )
    return 0
