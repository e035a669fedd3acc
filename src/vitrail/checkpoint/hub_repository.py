"""Weights in a folder or a repository of the hub, with a card that says what they are.

save_pretrained(model, "out")                      # out/model.safetensors, out/README.md
push_to_hub(model, "owner/name")                   # the same two, on the hub
model = from_pretrained("out")                     # or "owner/name", or any weights that vitrail reads
"""

import re
import tempfile
from pathlib import Path
from typing import Any, Final, Literal

import torch

from vitrail.checkpoint.bundle import Bundle
from vitrail.checkpoint.find_weights import find_weights, public
from vitrail.checkpoint.import_weights import FOLDER_FILES, read_bundle
from vitrail.checkpoint.model_card import model_card
from vitrail.checkpoint.public import registry
from vitrail.checkpoint.public.download_weights import is_offline
from vitrail.checkpoint.weights import bundle_of, head_changes, network, operate, write_bundle
from vitrail.core.atomic_files import write_file
from vitrail.core.errors import ConfigError, WeightsError, WeightsNotFound
from vitrail.core.text import Pair
from vitrail.models.build import Model

WEIGHTS: Final = "model.safetensors"
CARD: Final = "README.md"
REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
SETTINGS: Final = ("config.json", "preprocessor_config.json")


def from_pretrained(
    name: str | Path,
    *,
    classes: int | None = None,
    image_size: int | Pair | None = None,
    dtype: torch.dtype = torch.float32,
    revision: str | None = None,
    head: Literal["linear", "patches"] | None = None,
) -> Model:
    """The network of a folder, a file, weights that come with the package, NAME:TAG, or a repository of the hub
    ("owner/name"). What is there on disk comes first. `classes`, `image_size`, the kind of
    a new `head` and the mode are as in `load`; `revision` is a branch, a tag or a commit of a repository."""
    text = str(name)
    is_remote = REPOSITORY.fullmatch(text) is not None and not Path(text).exists()
    if revision is not None and not is_remote:
        raise ConfigError(f"revision={revision!r} is of a repository, and {text} is none")
    bundle = repository(text, revision) if is_remote else find_weights(name)
    changes = head_changes(bundle.config, classes, head)
    return network(operate(bundle, None, image_size, head=changes), dtype).train(bool(classes))


def save_pretrained(model: torch.nn.Module, folder: str | Path, *, name: str | None = None) -> Path:
    """Writes model.safetensors and its card, README.md, into a folder; the folder. A README.md that is there already
    stays as it is: somebody may have filled it in."""
    folder, bundle = Path(folder), bundle_of(model)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; give a folder")
    card = model_card(bundle, name=name)
    if not (folder / CARD).exists():
        write_file(folder / CARD, card.encode())
    write_bundle(bundle, folder / WEIGHTS)
    return folder


def push_to_hub(
    model: torch.nn.Module,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    message: str = "Weights by vitrail",
) -> str:
    """Uploads the weights and their card to a repository of the hub, which is made where there is none; its address.
    A card that is there already stays. The token is that of `hf auth login` or HF_TOKEN where none is given."""
    hub = client()
    if REPOSITORY.fullmatch(repo_id) is None:
        raise ConfigError(f"repository {repo_id!r} must be written owner/name")
    api = hub.HfApi(token=token)
    with tempfile.TemporaryDirectory(prefix="vitrail-") as temporary:
        folder = save_pretrained(model, temporary, name=repo_id)
        try:
            address = api.create_repo(repo_id, private=private, exist_ok=True)
            if api.file_exists(repo_id, CARD, revision=revision):
                (folder / CARD).unlink()
            api.upload_folder(
                repo_id=repo_id, folder_path=str(folder), commit_message=message, revision=revision, repo_type="model"
            )
        except Exception as error:  # of the client's, which has a dozen kinds
            raise WeightsError(
                f"{repo_id}: the hub did not take it ({first_line(error)}); log in with `hf auth login`, or set "
                "HF_TOKEN to a token that may write there"
            ) from error
    return str(address)


def repository(repo: str, revision: str | None) -> Bundle:
    """A repository's weights. One that the registry knows comes as its tag would, with the numerics it was trained in;
    of any other the weights and what lies next to them are fetched by huggingface_hub."""
    known = next((entry for entry in registry.PUBLIC if entry.repo == repo), None)
    if known is not None and revision is None:
        return public(known.model, known.tag)
    hub = client()
    try:
        folder = hub.snapshot_download(
            repo, revision=revision, allow_patterns=[*FOLDER_FILES, *SETTINGS], local_files_only=is_offline()
        )
    except Exception as error:  # of the client's, which has a dozen kinds
        raise WeightsNotFound(
            f"{repo}: no such file or folder here, and no repository that could be fetched ({first_line(error)})"
        ) from error
    return read_bundle(folder)


def client() -> Any:
    """huggingface_hub, which is optional."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(f"huggingface_hub is needed ({error}); pip install 'vitrail[hub]'") from None
    return huggingface_hub


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
