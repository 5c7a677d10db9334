"""``magicrl push``: a model and its card to the hub."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from magicrl.cli.options import Flag


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
    from magicrl.api.push import model_folder, push_model

    console = Console(highlight=False)
    folder = model_folder(run)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        told = f"{path.stat().st_size:>16,} bytes  {path.relative_to(folder)}"
        console.print(told, markup=False, soft_wrap=True)
    if dry_run:
        return 0
    console.print(
        f"pushed: {push_model(run, repository, public=public, message=message)}", markup=False, soft_wrap=True
    )
    return 0
