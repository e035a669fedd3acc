"""from_pretrained, save_pretrained and push_to_hub: a folder or a repository with weights and a card. No network."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

import vitrail
from tests.models.tiny import HYBRID, RESNET, VIT
from tests.predict.pictures import CLASSES, network
from vitrail.checkpoint import find_weights as find
from vitrail.checkpoint import hub_repository as repository
from vitrail.checkpoint.bundle import Card
from vitrail.checkpoint.hub_repository import escape_markdown, model_card
from vitrail.checkpoint.weights import to_bundle
from vitrail.core.errors import ConfigError, WeightsError, WeightsNotFound
from vitrail.models.family import ModelConfig

ROOT = Path(__file__).parents[2]
PROVENANCE = {
    "run": "finetune",
    "data": "pets",
    "seed": 3,
    "score": {"accuracy": 0.923456, "count": 3669},
    "cost": {"device_hours": 0.25},
    "command": "vitrail finetune vit_b_16:augreg_in21k pets",
    "from": {"weights": "vit_b_16:augreg_in21k"},
}


def told(config: ModelConfig = VIT, **provenance: Any) -> Any:
    model: Any = network(config)
    model.card = replace(model.card, provenance={**PROVENANCE, **provenance})
    return model


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("config", [VIT, HYBRID, RESNET, replace(VIT, classes=0, head="none")])
def test_there_and_back(tmp_path: Path, config: ModelConfig) -> None:
    model = told(config)
    folder = vitrail.save_pretrained(model, tmp_path / "new" / "out")
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "model.safetensors"]
    back = vitrail.from_pretrained(folder)
    assert same(back, model)
    assert (back.config, back.card) == (model.config, model.card)
    assert not back.training


def test_surgery_on_the_way_in(tmp_path: Path) -> None:
    folder = vitrail.save_pretrained(told(), tmp_path)
    model = vitrail.from_pretrained(str(folder), classes=3, image_size=(12, 24), dtype=torch.bfloat16)
    assert (model.config.classes, model.config.image, model.card.labels) == (3, (12, 24), None)
    assert next(model.parameters()).dtype == torch.bfloat16


def test_the_card_says_what_the_file_knows() -> None:
    text = model_card(to_bundle(told()), name="owner/name")
    for part in (
        "# owner/name",
        'vitrail.from_pretrained("owner/name")',
        "ViT of 2 layers, width 16, patch 2x3 of 5 classes",
        "| size | 6x12 pixels, RGB |",
        "| mean | 0.4, 0.5, 0.6 |",
        "5: a, b, c, d, wood pigeon.",
        "| recipe | finetune |",
        "| data | pets |",
        "| score: accuracy | 0.9235 |",
        "| cost: device hours | 0.25 |",
        r"| command | vitrail finetune vit\_b\_16:augreg\_in21k pets |",
        r"| started from: weights | vit\_b\_16:augreg\_in21k |",
        "pipeline_tag: image-classification",
    ):
        assert part in text, part
    count = sum(parameter.numel() for parameter in network(VIT).parameters())
    assert f"| parameters | {count:,} |" in text
    assert "not run" not in text


def test_the_card_of_a_network_that_knows_little() -> None:
    model: Any = network(replace(RESNET, classes=0))
    text = model_card(to_bundle(model))
    assert "pipeline_tag: image-feature-extraction" in text
    assert "None: it gives features." in text
    assert "| origin | not recorded in the file |" in text
    assert "layers" not in text
    model = network(VIT, labels=None)
    assert "5, without names in the file." in model_card(to_bundle(model))


def test_names_in_a_card_act_on_nothing() -> None:
    model: Any = network(VIT)
    labels = ("<script>alert(1)</script>", "a|b", "new\nline", "[x](y)", "{{ 7*7 }}")
    model.card = replace(model.card, labels=labels, provenance={"run": "x\n---\n# y"})
    text = model_card(to_bundle(model), name="owner/name")
    assert r"&lt;script>alert(1)&lt;/script>, a\|b, new line, \[x\](y), {{ 7\*7 }}." in text
    assert r"| recipe | x --- \# y |" in text
    assert "<script" not in text
    assert escape_markdown("a\x1b[31m") == r"a \[31m"


def test_many_classes_are_not_all_on_the_page() -> None:
    model: Any = network(replace(VIT, classes=150), labels=tuple(f"c{at}" for at in range(150)))
    text = model_card(to_bundle(model))
    assert "c99, and 50 more in the file." in text


def test_a_card_that_somebody_wrote_stays(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    vitrail.save_pretrained(told(), tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    with pytest.raises(ConfigError, match="is a file; give a folder"):
        vitrail.save_pretrained(told(), tmp_path / "README.md")


def test_the_blank_card_in_the_docs_is_the_one_that_is_filled_in() -> None:
    page = (ROOT / "docs" / "model-card.md").read_text("utf-8")
    assert re.findall("^## .*$", page, flags=re.MULTILINE) == re.findall(
        "^## .*$", model_card(to_bundle(told())), flags=re.MULTILINE
    )


class Hub:
    """What `push_to_hub` asks of huggingface_hub, written down."""

    def __init__(self, calls: list[Any], *, has_card: bool = False, fails: Exception | None = None) -> None:
        self.calls, self.has_card, self.fails = calls, has_card, fails

    def __call__(self, token: str | None = None) -> "Hub":
        self.calls.append(("token", token))
        return self

    def create_repo(self, repo_id: str, *, private: bool | None, exist_ok: bool) -> str:
        if self.fails is not None:
            raise self.fails
        self.calls.append(("create", repo_id, private, exist_ok))
        return f"https://hub/{repo_id}"

    def file_exists(self, repo_id: str, filename: str, *, revision: str | None) -> bool:
        return self.has_card and filename == "README.md"

    def upload_folder(self, *, repo_id: str, folder_path: str, **rest: Any) -> None:
        files = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
        self.calls.append(("upload", repo_id, files, rest))


def test_a_push_carries_weights_and_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub(calls))
    model = told()
    assert vitrail.push_to_hub(model, "owner/name", private=True, token="t", message="m") == "https://hub/owner/name"
    (_, token), create, (_, repo, files, rest) = calls
    assert (token, create) == ("t", ("create", "owner/name", True, True))
    assert (repo, sorted(files)) == ("owner/name", ["README.md", "model.safetensors"])
    assert rest == {"commit_message": "m", "revision": None, "repo_type": "model"}
    assert b"# owner/name" in files["README.md"]
    (tmp_path / "model.safetensors").write_bytes(files["model.safetensors"])
    assert same(vitrail.from_pretrained(tmp_path), model)


def test_a_push_leaves_a_card_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub(calls, has_card=True))
    vitrail.push_to_hub(told(), "owner/name")
    assert list(calls[-1][2]) == ["model.safetensors"]


def test_a_push_that_is_refused_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = PermissionError("403 Forbidden\nmore")
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub([], fails=refused))
    with pytest.raises(
        WeightsError, match=r"owner/name: the hub refused the upload \(403 Forbidden\); log in with"
    ) as said:
        vitrail.push_to_hub(told(), "owner/name")
    assert said.value.__cause__ is refused
    for wrong in ("name", "a/b/c", "../x", "owner/"):
        with pytest.raises(ConfigError, match="must be written owner/name"):
            vitrail.push_to_hub(told(), wrong)


def test_a_repository_is_fetched_where_nothing_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = told(), list[Any]()
    there = vitrail.save_pretrained(model, tmp_path / "cache")

    def snapshot(repo: str, **rest: Any) -> str:
        asked.append((repo, rest["revision"], rest["local_files_only"]))
        assert "model.safetensors" in rest["allow_patterns"]
        assert "config.json" in rest["allow_patterns"]
        return str(there)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setenv("VITRAIL_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.chdir(tmp_path)
    assert same(vitrail.from_pretrained("owner/name", revision="v1"), model)
    monkeypatch.setenv("VITRAIL_OFFLINE", "1")
    assert vitrail.from_pretrained("owner/name").card == model.card
    assert asked == [("owner/name", "v1", False), ("owner/name", None, True)]
    vitrail.save_pretrained(network(VIT), tmp_path / "owner" / "name")  # what is on disk comes first
    assert vitrail.from_pretrained("owner/name").card.provenance == {}
    assert len(asked) == 2


def test_a_repository_of_the_registry_comes_as_its_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = repository.registry.PUBLIC[0]
    bundle = to_bundle(told())
    monkeypatch.setattr(
        repository, "load_public", lambda name, tag: bundle if (name, tag) == (entry.model, entry.tag) else None
    )
    assert vitrail.from_pretrained(entry.repo).card == bundle.card


def test_the_same_weights_elsewhere_carry_their_licence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = vitrail.save_pretrained(told(), tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **rest: str(there))
    provenance = vitrail.from_pretrained("facebook/dinov3-vitb16-pretrain-lvd1689m").card.provenance
    assert provenance["licence"] == "dinov3-license"
    assert "dinov3_b_16:lvd1689m is gated" in capsys.readouterr().err
    assert vitrail.from_pretrained("facebook/dinov2-base").card.provenance["licence"] == "apache-2.0"
    assert not capsys.readouterr().err


def test_a_gated_repository_says_how_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(repo: str, **rest: Any) -> str:
        raise OSError("403 Client Error")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    gate = r"\(403 Client Error\); these weights are gated: .*dinov3-vitb16-pretrain-lvd1689m.*HF_TOKEN"
    with pytest.raises(WeightsNotFound, match=gate):
        vitrail.from_pretrained("facebook/dinov3-vitb16-pretrain-lvd1689m")


def test_a_repository_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def snapshot(repo: str, **rest: Any) -> str:
        raise OSError("401 Client Error\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(WeightsNotFound, match=r"owner/name: no such file or folder here.*\(401 Client Error\)"):
        vitrail.from_pretrained("owner/name")
    with pytest.raises(WeightsNotFound, match="no such weight file or folder"):
        vitrail.from_pretrained("nothing")
    with pytest.raises(ConfigError, match="revision='v1' is for a repository"):
        vitrail.from_pretrained(tmp_path, revision="v1")


def test_without_the_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for work in (lambda: vitrail.push_to_hub(told(), "a/b"), lambda: vitrail.from_pretrained("a/b")):
        with pytest.raises(ConfigError, match=r"pip install 'vitrail\[hub\]'"):
            work()


def test_weights_are_found_by_path_name_and_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = vitrail.save_pretrained(told(), tmp_path)
    assert find.find_weights(folder / "model.safetensors").card.labels == CLASSES
    monkeypatch.setattr(find, "load_public", lambda name, tag: (name, tag))
    assert find.find_weights("vit_b_16:augreg_in21k") == ("vit_b_16", "augreg_in21k")
    assert isinstance(vitrail.from_pretrained(folder).card, Card)
