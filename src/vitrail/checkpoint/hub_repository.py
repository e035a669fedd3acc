"""Weights in a folder or a repository of the hub, with a model card that describes them.

    save_pretrained(model, "out")         # out/model.safetensors, out/README.md
    push_to_hub(model, "owner/name")      # the same two files, on the hub
    model = from_pretrained("out")        # or "owner/name", or any weights that vitrail reads

The card is filled in from the file; what only the author can know is left as questions at its end. docs/model-card.md
is a blank card with the same headings.
"""

import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

import torch

from vitrail.checkpoint import known_weights as registry
from vitrail.checkpoint.bundle import Bundle
from vitrail.checkpoint.download_weights import explain_gate, is_offline
from vitrail.checkpoint.find_weights import FOLDER_FILES, INDEX, find_weights, load_public, name_licence, read_bundle
from vitrail.checkpoint.weights import build_network, replace_head_and_resize, to_bundle, write_bundle
from vitrail.core.atomic_files import write_file
from vitrail.core.errors import ConfigError, WeightsError, WeightsNotFound
from vitrail.core.text import Pair, format_size
from vitrail.data.training_record import KEY
from vitrail.models.build import Model
from vitrail.models.zoo import network_name

CardRow: TypeAlias = tuple[str, str]

CARD_TEMPLATE: Final = "model-card.md.jinja"
MOST_NAMED: Final = 100  # classes that are named in the card; the file has them all


def model_card(bundle: Bundle, *, name: str | None = None) -> str:
    """The card of a network as Markdown, with the header that a hub reads. `name` is owner/name of its repository."""
    config, card = bundle.config, bundle.card
    title = network_name(config)
    about = f"of {config.classes:,} classes" if config.classes else "without a head, for features"
    about += " per pixel" if config.has_patch_head else ""
    about += ", several of which may apply to an image (sigmoid)" if card.multi_label else ""
    heads = {False: "image-classification", True: "image-segmentation"}
    images, origin = card.preprocessing, origin_rows(card.abridge().provenance)
    resized = f"{images.resize} on the shorter side, centre" if images.resize else "that size, whatever the aspect"
    from jinja2 import Environment, StrictUndefined  # loaded when a card is made

    text = resources.files("vitrail").joinpath("assets", CARD_TEMPLATE).read_text("utf-8")
    made = Environment(undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True, autoescape=False)
    return made.from_string(text).render(
        task=heads[config.has_patch_head] if config.classes else "image-feature-extraction",
        title=escape_markdown(name or title),
        summary=f"{title} {about}, {config.parameters:,} parameters, for images of {format_size(config.image)} pixels.",
        place=json.dumps(name or "."),
        network=[
            ("network", title),
            ("parameters", f"{config.parameters:,}"),
            ("multiply-accumulates per image", f"{config.macs / 1e9:.3g} G"),
            *config.card_rows,
        ],
        images=[
            ("size", f"{format_size(images.image)} pixels, RGB"),
            ("resized to", resized),
            ("interpolation", images.interpolation + ("" if images.antialias else ", not antialiased")),
            ("mean", ", ".join(f"{value:g}" for value in images.mean)),
            ("standard deviation", ", ".join(f"{value:g}" for value in images.std)),
        ],
        classes=class_names(config.classes, card.labels),
        origin=origin or [("origin", "not recorded in the file")],
    )


def class_names(classes: int, labels: Iterable[str] | None) -> str:
    if not classes:
        return "None: it gives features."
    if labels is None:
        return f"{classes:,}, without names in the file."
    names = [escape_markdown(label) for label in labels]
    more = f", and {len(names) - MOST_NAMED:,} more in the file" if len(names) > MOST_NAMED else ""
    return f"{classes:,}: {', '.join(names[:MOST_NAMED])}{more}."


def origin_rows(provenance: Mapping[str, Any], prefix: str = "") -> list[CardRow]:
    """The provenance in the file, one fact per row, followed by that of the weights it started from."""
    known = {"run": "recipe", "from": "started from", "imported_from": "format it came in", "file": "file it came in"}
    rows: list[CardRow] = []
    for key, value in provenance.items():
        name = f"{prefix}{known.get(key, key.replace('_', ' '))}"
        if isinstance(value, Mapping):
            rows += origin_rows(value, f"{name}: ")
        elif key == KEY:
            rows += [row for record in value for row in origin_rows(record, f"{name}: ")]
        else:
            values = cast(list[object], value) if isinstance(value, list | tuple) else [value]
            words = [f"{one:.4g}" if one is value and isinstance(one, float) else str(one) for one in values]
            rows.append((escape_markdown(name), escape_markdown(", ".join(words))))
    return rows


def escape_markdown(text: str) -> str:
    """Escapes text from a file for one line of Markdown, so that neither Markdown nor HTML interprets any of it."""
    line = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    return "".join(f"\\{sign}" if sign in "\\`*_[]|#" else {"<": "&lt;", "&": "&amp;"}.get(sign, sign) for sign in line)


WEIGHTS: Final = "model.safetensors"
CARD: Final = "README.md"
REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def from_pretrained(
    name: str | Path,
    *,
    classes: int | None = None,
    image_size: int | Pair | None = None,
    patch: int | Pair | None = None,
    channels: int | None = None,
    dtype: torch.dtype = torch.float32,
    revision: str | None = None,
    head: Literal["linear", "patches"] | None = None,
) -> Model:
    """The network of a folder, a file, weights that come with the package, NAME:TAG, or a repository of the hub
    ("owner/name"). Local files take precedence. `classes`, `image_size`, `patch`, `channels`, the kind of a new `head`
    and the mode are as in `load`; `revision` is a branch, a tag or a commit of a repository."""
    text = str(name)
    is_remote = REPOSITORY.fullmatch(text) is not None and not Path(text).exists()
    if revision is not None and not is_remote:
        raise ConfigError(f"revision={revision!r} is for a repository, and {text} is not one")
    bundle = repository(text, revision) if is_remote else find_weights(name)
    bundle = replace_head_and_resize(bundle, classes, image_size, kind=head, patch=patch, channels=channels)
    return build_network(bundle, dtype).train(bool(classes))


def save_pretrained(model: torch.nn.Module, folder: str | Path, *, name: str | None = None) -> Path:
    """Writes model.safetensors and its card, README.md, into a folder, and returns the folder. An existing README.md is
    kept: somebody may have filled it in."""
    folder, bundle = Path(folder), to_bundle(model)
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
    """Uploads the weights and their card to a repository of the hub, which is created if necessary, and returns its
    address. An existing card is kept. Without a token, that of `hf auth login` or HF_TOKEN is used."""
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
            files: Any = {"repo_id": repo_id, "folder_path": str(folder), "repo_type": "model"}
            api.upload_folder(**files, commit_message=message, revision=revision)
        except Exception as error:  # of the client's, which has a dozen kinds
            remedy = "log in with `hf auth login`, or set HF_TOKEN to a token that may write there"
            raise WeightsError(f"{repo_id}: the hub refused the upload ({first_line(error)}); {remedy}") from error
    return str(address)


def repository(repo: str, revision: str | None) -> Bundle:
    """Reads a repository's weights. A repository in the registry is read like its tag, with the numerics it was trained
    in; for any other, huggingface_hub fetches the weights and the files next to them."""
    known = registry.find_repository(repo)
    if known is not None and known.repo == repo and revision is None:
        return load_public(known.model, known.tag)
    hub, pieces = client(), [INDEX, "model-*-of-*.safetensors"]
    files = [*FOLDER_FILES, *pieces, "config.json", "preprocessor_config.json", "processor_config.json"]
    try:
        folder = hub.snapshot_download(repo, revision=revision, allow_patterns=files, local_files_only=is_offline())
    except Exception as error:  # of the client's, which has a dozen kinds
        fault = f"{repo}: no such file or folder here, and no repository that could be fetched"
        remedy = f"; {explain_gate(repo)}" if known is not None and known.access == "gated" else ""
        raise WeightsNotFound(f"{fault} ({first_line(error)}){remedy}") from error
    bundle = read_bundle(folder)
    return bundle if known is None else name_licence(bundle, known)


def client() -> Any:
    """huggingface_hub, which is optional."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(f"huggingface_hub is needed ({error}); pip install 'vitrail[hub]'") from None
    return huggingface_hub


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
