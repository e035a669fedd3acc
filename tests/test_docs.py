"""The documentation does what it says.

Every page is walked from top to bottom in an empty folder: a ```python block is executed, in one namespace for the
page; a `$ vitrail ...` line of a ```console block is run through the command line, and what stands below it is
what it prints. A ```text block right behind a ```python block is what that one prints. Differences in rounding and
versions of other libraries are masked, nothing else is. A comment right before the fence changes the rule:

    <!-- not run: reason -->    the block needs the network, or a file that does not come with the package
    <!-- exit 2 -->             the command of the block ends with this status

docs/quickstart.md is walked in its own clone, server and all, by tests/test_quickstart_path.py. Every `vitrail` line of
every page, also where it is not run, is one that the command line would take. The examples lie in the folder.

Tables between `<!-- table: name -->` and `<!-- end -->` are generated; `python -m tests.test_docs` writes them again.
"""

import ast
import contextlib
import io
import json
import math
import re
import runpy
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch

import vitrail
from tests.data.datasets import tables as data_tables
from tests.lanes import mark_slow
from tests.models import tables as family_tables
from tests.train import tables as train_tables
from vitrail.checkpoint import convert
from vitrail.checkpoint import known_weights as registry
from vitrail.checkpoint import parity_check as peers
from vitrail.checkpoint.bundle import Bundle
from vitrail.checkpoint.formats.huggingface import folder as huggingface
from vitrail.checkpoint.formats.registry import FORMATS
from vitrail.checkpoint.weights import build_fresh, to_bundle
from vitrail.cli import networks as models
from vitrail.cli.app import COMMANDS, command_parser, main
from vitrail.core.errors import ExportRefused, VitrailError
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.build import tensor_shapes
from vitrail.models.family import ModelConfig, sum_steps
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import ZOO, adapt_config, hybrid_backbone, model_config, slug

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Pages whose examples take a while: the slow lane's.
LONG = (
    "data.md",
    "inspection.md",
    "weights.md",
    "training.md",
    "fit.md",
    "export.md",
    "finetuning.md",
    "selfsup.md",
    "evaluation.md",
    "studies.md",
    "pretraining.md",
    "segmentation.md",
)
WALKED = [
    pytest.param(page, marks=pytest.mark.slow if page.name in LONG else ())
    for page in PAGES
    if page.name != "quickstart.md"
]
EXAMPLES = [*PAGES, *sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "examples").glob("*.ipynb"))]
PUBLIC = {*vitrail.__all__, "export", "inspection"}
FIGURE = ROOT / "docs" / "figures" / "network.py"


# Pages, block by block.


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A fenced block: its language, text and first line, and the comment right before it."""

    language: str
    text: str
    line: int
    comment: str


def blocks(page: Path) -> list[Block]:
    fence = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    text = page.read_text("utf-8")
    return [
        Block(
            language=found[2], text=found[3], line=text.count("\n", 0, found.start(3)) + 1, comment=str(found[1] or "")
        )
        for found in fence.finditer(text)
    ]


def status_of(block: Block) -> int:
    return int(found[1]) if (found := re.fullmatch(r"exit (\d+)", block.comment)) else 0


def commands(block: Block) -> list[tuple[str, str]]:
    """Each `$` line with the output that is shown below it."""
    parts = re.split(r"^\$ (.*)\n", block.text, flags=re.MULTILINE)
    assert not parts[0].strip(), f"line {block.line}: a console block starts with $"
    return list(zip(parts[1::2], parts[2::2], strict=True))


def masked(output: str) -> list[str]:
    """Lines without what differs between machines: rounding, versions, and blanks at the ends of lines."""
    text = re.sub(r"\d\.\d\de[+-]\d\d", "0.00e-00", output)
    text = re.sub(r"(timm|transformers|torchvision|onnxruntime|torch) \d[\w.+]*", r"\1 0", text)
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n").splitlines()


def printed(work: Callable[[], object]) -> tuple[object, str]:
    """What a call returns, and what it says on either stream."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        value = work()
    return value, said.getvalue()


def id_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", WALKED, ids=id_of)
def test_examples_run_and_print_what_is_shown(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    for name in ("VITRAIL_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")  # what needs the network says so in a comment
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        walk_through(page)


def python_in(page: Path) -> str:
    """All Python of a page, a script or a notebook."""
    if page.suffix == ".md":
        return "\n".join(block.text for block in blocks(page) if block.language == "python")
    text = page.read_text("utf-8")
    if page.suffix == ".py":
        return text
    cells = json.loads(text)["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.parametrize("page", EXAMPLES, ids=id_of)
def test_examples_take_public_names(page: Path) -> None:
    """Whoever uses the package imports `vitrail` and nothing below it."""
    for node in ast.walk(ast.parse(python_in(page))):
        match node:
            case ast.Import(names=names):
                taken = [name.name.removeprefix("vitrail.") for name in names if name.name.startswith("vitrail.")]
                assert not taken, f"{id_of(page)} imports {taken}"
            case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] == "vitrail":
                assert module == "vitrail", f"{id_of(page)} imports from {module}"
                assert {name.name for name in names} <= PUBLIC, id_of(page)
            case ast.Attribute(value=ast.Name(id="vitrail"), attr=attribute):
                assert attribute in PUBLIC | {"__version__"}, f"{id_of(page)} uses vitrail.{attribute}"
            case _:
                pass


def walk_through(page: Path) -> None:
    """The blocks of a page in their order, in one namespace."""
    namespace: dict[str, Any] = {"__name__": "page"}
    last = ""
    for block in blocks(page):
        where = f"{id_of(page)}:{block.line}"
        if block.comment.startswith("not run: "):
            continue
        assert not block.comment or status_of(block), f"{where}: what does the comment {block.comment!r} mean?"
        match block.language:
            case "python":
                code = compile("\n" * (block.line - 1) + block.text, id_of(page), "exec")
                _, last = printed(lambda code=code: exec(code, namespace))
            case "text":
                assert masked(last) == masked(block.text), where
            case "console":
                for command, shown in commands(block):
                    words = shlex.split(command)
                    assert words[0] == "vitrail", f"{where}: cannot run {command!r}"
                    status, said = printed(lambda words=words: main(words[1:]))
                    assert status == status_of(block), f"{where}: {said}"
                    if shown.strip():
                        assert masked(said) == masked(shown), where
            case other:
                raise AssertionError(f"{where}: a block is python, console or text, not {other!r}")


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_every_command_is_one_that_there_is(page: Path) -> None:
    """Also those that are not run: typed as they stand, none is refused for what it is called or for its options."""
    for line, text in typed(page):
        words = shlex.split(text)[1:]
        for name in (" ".join(words[:2]), words[0] if words else ""):
            if name in COMMANDS:
                break
        else:
            assert not words or words[0].startswith(("<", "-")), f"{id_of(page)}:{line}: {text}"
            continue
        parser = command_parser(name)
        try:
            parser.parse_intermixed_args(words[len(name.split()) :])
        except VitrailError as error:
            raise AssertionError(f"{id_of(page)}:{line}: {text}: {error}") from None


def typed(page: Path) -> list[tuple[int, str]]:
    """Every line of a page that is a `vitrail` command, after `$` or in an indented block, without the shell's part."""
    found: list[tuple[int, str]] = []
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        match = re.match(r"^(?: *\$ |    )(?:\w+=\S+ )?(vitrail .*)$", line)
        if match is None or "|" in match[1].split("'")[0] or re.search(r"\[\w|\.\.\.", match[1]):
            continue  # pipes, and what is to be filled in
        found.append((number, re.split(r"(?:^| )#|[>&;]", match[1])[0]))
    return found


def test_the_first_command_of_the_readme_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands there, in a clone."""
    monkeypatch.chdir(ROOT)
    command = next(text for _, text in typed(ROOT / "README.md") if text.startswith("vitrail predict"))
    status, said = printed(lambda: main(shlex.split(command)[1:]))
    assert status == 0
    assert "ship" in said


def test_index_lists_every_public_name() -> None:
    table = (ROOT / "docs" / "README.md").read_text("utf-8").partition("## In Python")[2].partition("\n## ")[0]
    assert set(re.findall(r"`vitrail\.(\w+)`", table)) == PUBLIC


def test_readme_names_every_command() -> None:
    """A command more is a line in the table."""
    table = (ROOT / "README.md").read_text("utf-8").partition("## Commands")[2].partition("##")[0]
    named = {found.removeprefix("vitrail ") for found in re.findall(r"`([^`\n]+)`", table)}
    assert set(COMMANDS) <= named


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) < 200


@pytest.mark.parametrize("index", ["README.md", "docs/README.md"])
def test_every_page_is_found_from_the_index(index: str) -> None:
    text = (ROOT / index).read_text("utf-8")
    linked = {((ROOT / index).parent / target).resolve() for target in re.findall(r"\]\(([^)#\s]+)", text)}
    missing = [id_of(page) for page in PAGES if page.resolve() not in linked and page.name != "README.md"]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_links_and_pictures_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'(?:src|href)="([^"]+)"', prose)
    for target in targets:
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        found = page.parent / file if file else page
        assert found.exists(), f"{id_of(page)}: {target}"
        if anchor:
            assert anchor in anchors(found), f"{id_of(page)}: {target}"


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links to them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("config", [ViTConfig, ResNetConfig])
def test_every_config_field_is_explained(config: type[Any]) -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "models.md").read_text("utf-8"), flags=re.MULTILINE)
    assert {field.name for field in fields(config)} <= set(rows)


@pytest.mark.slow
def test_families_that_set_a_part_are_named() -> None:
    """The last column of the tables in "The parts"."""
    section = (ROOT / "docs" / "models.md").read_text("utf-8").partition("\n## The parts\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \|[^|]*\|[^|]*\| ([^|]+) \|$", section, flags=re.MULTILINE))
    assert set(rows) == set(ViTConfig.parts)
    every = [family.name for family in family_tables.TRANSFORMERS]
    for field, told in rows.items():
        found = family_tables.families_with(field)
        rest = [name for name in every if name not in found]
        assert told in (", ".join(found) or "none", f"all but {', '.join(rest)}"), field


def test_every_module_of_a_network_is_on_the_map() -> None:
    text = (ROOT / "docs" / "paper-map.md").read_text("utf-8")
    for module in (ROOT / "src" / "vitrail" / "models").glob("[!_]*.py"):
        assert f"(../src/vitrail/models/{module.name})" in text, module.name


def test_figure_is_what_its_script_draws() -> None:
    script = runpy.run_path(str(FIGURE))
    assert FIGURE.with_suffix(".svg").read_text("utf-8") == script["svg"]()


def test_figure_shows_the_shapes_of_the_walk() -> None:
    drawn = re.sub(r"<[^>]+>", "", FIGURE.with_suffix(".svg").read_text("utf-8"))
    steps = list(model_config("ViT-L/32", image_size=256).walk())
    for step in steps:
        if step.name.startswith(("image", "patches", "embeddings", "positions", "head")) or "q k v" in step.name:
            assert " × ".join(str(size) for size in step.shape) in drawn, step.name
    total = sum_steps(steps)
    assert f"{total.params:,}" in drawn
    assert f"{total.macs:,}" in drawn


# Generated tables.

MARKED = re.compile(r"(<!-- table: ([^\n]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def markdown(heads: Iterable[str], rows: Iterable[Iterable[object]], *, right: int = 0) -> str:
    """A table; the last `right` columns hold numbers."""
    heads = list(heads)
    rule = ["---"] * (len(heads) - right) + ["---:"] * right
    lines = [heads, rule, *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def model_table(sizes: tuple[int, int]) -> str:
    heads = ["network", "slug", "width", "depth", "MLP", "heads", "parameters"]
    heads += [f"{what} {size}" for size in sizes for what in ("tokens", "GMACs")]
    rows: list[list[str]] = []
    for name, config in ZOO.items():
        if models.table_sizes(name) != sizes:
            continue
        if isinstance(config, ViTConfig):
            shape = [config.width, config.depth, config.mlp_width, config.heads]
        else:
            shape = [config.features, "-".join(map(str, config.blocks)), "-", "-"]
        at = [models.config_at(name, size, 1000) for size in sizes]
        cost = [
            cell
            for config in at
            for cell in (f"{config.tokens:,}" if config.tokens else "-", f"{config.macs / 1e9:,.2f}")
        ]
        rows.append([name, code(slug(name)), *map(str, shape), f"{at[0].parameters:,}", *cost])
    return markdown(heads, rows, right=len(heads) - 2)


def public_table() -> str:
    heads = ["family", "weights", "image", "classes", "licence", "on the hub"]
    rows = [
        [
            e.family,
            code(e.name),
            e.image,
            e.classes or "none",
            f"{e.licence}, {e.access}".removesuffix(", open"),
            e.repo,
        ]
        for e in registry.PUBLIC
    ]
    return markdown(heads, rows)


# Key tables. Every size of these networks is another number, so that a shape can be written in letters.
LETTERS = {24: "D", 72: "3D", 2: "k", 12: "D_h", 40: "M", 10: "K", 7: "P", 5: "C", 49: "N", 50: "N+1"}
LETTER_VIT = ViTConfig(
    width=24, depth=1, mlp_width=40, heads=2, image=(49, 49), patch=(7, 7), channels=5, classes=10, head="tanh"
)
INDEX = (
    (r"\b(blocks|layer|layers)\.0\.", r"\1.{i}."),
    (r"(encoderblock|encoder_layer)_0", r"\1_{i}"),
    (r"stages\.0\.(blocks\.|layers\.)?(0|\{i\})\.", r"stages.{s}.\1{b}."),
    (r"stages\.0\.(blocks|layers)\.\{i\}\.", r"stages.{s}.\1.{b}."),
    (r"block1/unit1/", "block{s+1}/unit{b+1}/"),
    (r"block1/unit01/", "block{s+1}/unit{b+1:02d}/"),
)


def indexed(name: str) -> str:
    for pattern, text in INDEX:
        name = re.sub(pattern, text, name)
    return name


def braced(names: Iterable[str]) -> str:
    """Names that differ in some of their parts, as one."""
    names = list(dict.fromkeys(names))
    split = [re.split(r"([./])", name) for name in names]
    columns = [list(dict.fromkeys(column)) for column in zip(*split, strict=True)]
    if math.prod(len(column) for column in columns) != len(names):
        return ", ".join(names)
    return "".join(column[0] if len(column) == 1 else "{" + ",".join(column) + "}" for column in columns)


def keys(name: str, config: ModelConfig) -> dict[str, tuple[str, str]]:
    """Ours to theirs, weight with bias and numbered parts together, and the shape of theirs in letters."""
    shapes, groups = tensor_shapes(config), dict[str, list[Any]]()
    for entry in FORMATS[name].table(config):
        if not re.search(r"stages\.(0\.[1-9]|[1-9])", entry.ours):
            groups.setdefault(re.sub(r"\d?\.(weight|bias)$", "", entry.ours), []).append(entry)
    out: dict[str, tuple[str, str]] = {}
    for group in groups.values():
        theirs = braced(indexed(their) for entry in group for their in entry.names)
        with torch.device("meta"):
            part = group[0].to_theirs(torch.empty(shapes[group[0].ours]))[0]
        shape = ", ".join(LETTERS.get(size, str(size)) for size in part.shape)
        out[braced(indexed(entry.ours) for entry in group)] = (theirs, f"[{shape}]")
    return out


def own_shapes(config: ModelConfig) -> dict[str, str]:
    shapes = {indexed(name): shape for name, shape in tensor_shapes(config).items()}
    return {name: f"[{', '.join(LETTERS.get(size, str(size)) for size in shape)}]" for name, shape in shapes.items()}


def google_keys() -> str:
    plain = adapt_config(LETTER_VIT, position_prefix=False)
    original, linen = keys("npz", LETTER_VIT), keys("npz-linen", LETTER_VIT)
    big_vision = keys("npz-big-vision", plain)
    rows: list[list[str]] = []
    for ours, (theirs, shape) in original.items():
        newer = [linen[ours][0], big_vision[ours][0]]
        newer = [code(name) if name != old else "same" for name, old in zip(newer, [theirs, newer[0]], strict=True)]
        rows.append([code(ours), code(theirs), code(shape), *newer])
    return markdown(["ours", "`npz`", "shape there", "`npz-linen`", "`npz-big-vision`"], in_blocks(rows))


def torch_keys() -> str:
    linear = adapt_config(LETTER_VIT, head="linear")
    timm, four, vision = keys("timm", linear), keys("huggingface", linear), keys("torchvision", LETTER_VIT)
    pooler = keys("huggingface", adapt_config(LETTER_VIT, classes=0, head="tanh"))
    shapes = own_shapes(LETTER_VIT)
    rows: list[list[str]] = []
    order = list(shapes)
    for ours in sorted(vision, key=lambda ours: min(order.index(name) for name in expanded(ours) & {*order})):
        theirs = vision[ours][0]
        hf = four[ours][0] if ours in four else pooler[ours][0]
        shape = next(shape for name, shape in shapes.items() if name in expanded(ours))
        rows.append(
            [code(ours), code(shape), *(code(name) for name in (timm.get(ours, ("",))[0], hf, five(hf), theirs))]
        )
    return markdown(["ours", "shape", "timm", "Hugging Face 4", "Hugging Face 5", "torchvision"], in_blocks(rows))


def in_blocks(rows: list[list[str]]) -> list[list[str]]:
    """What the names of one block begin with, in a line of its own; dots stand for it further down."""
    prefix = re.compile(r"(?<=`)[\w./]*\{i\}[./]")
    first = [f"`…` is `{found[0]}`" if (found := prefix.search(cell)) else "" for cell in rows[3]]
    rows = [[prefix.sub("…", cell) for cell in row] for row in rows]
    return [*rows[:3], first, *rows[3:]]


def expanded(name: str) -> set[str]:
    return {name.replace("{weight,bias}", part) for part in ("weight", "bias")}


def five(name: str) -> str:
    """A name of transformers 4 as 5 has it, by the table that reads 5 as 4."""
    if name.startswith("vit.encoder.layer."):
        name = "vit.layers." + name.removeprefix("vit.encoder.layer.")
        name = name.replace("attention.attention.{query,key,value}.", "attention.{q_proj,k_proj,v_proj}.")
        for new, old in huggingface.FIVE.items():
            name = name.replace(old, new.replace("\\", "")) if old.split(".")[0] in name else name
    return name


def trunk_keys() -> str:
    trunk = hybrid_backbone((1, 1), (49, 49))
    hybrid = ViTConfig(
        width=24, depth=1, mlp_width=40, heads=2, image=(49, 49), patch=(1, 1), backbone=trunk, classes=10
    )
    npz, timm = keys("npz", hybrid), keys("timm", hybrid)
    rows = [
        [code(ours), code(npz[ours][0]), code(timm[ours][0])] for ours in npz if ours.startswith("embedding.backbone.")
    ]
    return markdown(["ours", "`npz`", "timm"], rows)


def bit_keys() -> str:
    bit = ResNetConfig(blocks=(1, 1), classes=10)
    npz, timm, four = keys("npz-bit", bit), keys("timm", bit), keys("huggingface", bit)
    rows = [[code(ours), *(code(table[ours][0]) for table in (npz, timm, four))] for ours in npz]
    return markdown(["ours", "`npz-bit`", "timm", "Hugging Face"], rows)


# What each format does with each field: tried out, field by field.

TARGETS = {
    "timm file": ("timm", "m.safetensors"),
    "timm folder": ("timm", "m"),
    "Hugging Face": ("huggingface", "m"),
    "torchvision": ("torchvision", "m.pth"),
    "`npz`, `npz-linen`": ("npz", "m.npz"),
    "`npz-big-vision`": ("npz-big-vision", "m.npz"),
}
BIT_TARGETS = {
    "timm file": TARGETS["timm file"],
    "Hugging Face": ("huggingface", "m"),
    "`npz-bit`": ("npz-bit", "m.npz"),
}
FIELDS: dict[str, dict[str, Any]] = {
    "`width`, `depth`, `mlp_width`, `patch`, `channels`, `classes`": {"patch": 8, "channels": 1, "classes": 7},
    "`heads` of a published shape": {"heads": 3},
    "`heads` otherwise": {"heads": 6},
    "`image`, square grid": {"image": 48},
    "`image`, other grids": {"image": (32, 48)},
    "`head='tanh'` with classes": {"head": "tanh"},
    "`head='patches'`": {"head": "patches"},
    "`head='none'`": {"head": "none"},
    "`pool='mean'`": {"pool": "mean"},
    "`class_token=False`": {"class_token": False, "pool": "mean"},
    "`norm_after_pool=True`": {"norm_after_pool": True, "pool": "mean"},
    "`registers`, `position_prefix=False`": {"registers": 4, "position_prefix": False},
    "`position_prefix=True`": {"position_prefix": True},
    "`position_prefix=False`": {"position_prefix": False},
    "`position='none'`": {"position": "none"},
    "`position='sincos2d'`": {"position": "sincos2d"},
    "`position`, any other but 'learned'": {"position": "learned2d"},
    "`placement='every'`, `'shared'`": {"placement": "every"},
    "`attention='axial'`": {"attention": "axial", "class_token": False, "pool": "mean"},
    "`qkv_bias=False`": {"qkv_bias": False},
    "`gelu='tanh'`": {"gelu": "tanh"},
    "`gelu='erf'`": {"gelu": "erf"},
    "`norm_eps=1e-5`": {"norm_eps": 1e-5},
    "`dropout`, `attention_dropout`": {"dropout": 0.1, "attention_dropout": 0.1},
    "`stochastic_depth`": {"stochastic_depth": 0.1},
    "labels": {"labels": tuple("abcdefghij")},
    "preprocessing": {"preprocessing": Preprocessing(image=(32, 32), resize=40, std=(0.2, 0.3, 0.4))},
}
BIT_FIELDS: dict[str, dict[str, Any]] = {
    "`blocks`, `factor`, `channels`, `classes`": {"channels": 1},
    "`image`": {"image": (96, 96)},
    "`groups`": {"groups": 16},
    "`norm_eps`, `standardisation`, `padding`, `pool_padding`": {"padding": "same", "norm_eps": 1e-6},
    "`standardisation_eps=1e-8`": {"standardisation_eps": 1e-8},
    "`standardisation_eps=1e-10`": {"standardisation_eps": 1e-10},
    "`unit='postactivation'`": {"unit": "postactivation", "padding": "same", "pool_padding": "infinity"},
    "`root='3x3'`": {"root": "3x3"},
    "`mixing='axial'`": {"mixing": "axial"},
}


def fate(config: ModelConfig, changes: dict[str, Any], to: str, target: str) -> str:
    """Whether reading the bare format gives the values back, a sidecar does, or the export is refused."""
    card = {name: value for name, value in changes.items() if name in ("labels", "preprocessing")}
    network = {name: value for name, value in changes.items() if name not in card}
    if to == "npz-big-vision" and changes.get("class_token", True):
        network.setdefault("position_prefix", False)  # its own way; else every line would say "refused"
    bundle = to_bundle(build_fresh(adapt_config(config, **network)), **card)
    try:
        with tempfile.TemporaryDirectory() as folder:
            unheld = convert.export(bundle, Path(folder) / target, to).lost_fields
    except ExportRefused:
        return "refused"
    usual = {"gelu", "preprocessing", "standardisation_eps"} - set(changes)  # the base network's own, not this line's
    return "sidecar" if set(unheld) - usual else "held"


def field_table(config: ModelConfig, lines: dict[str, dict[str, Any]], targets: dict[str, tuple[str, str]]) -> str:
    rows: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "build_reference", lambda *_: "not asked")
        for line, changes in lines.items():
            rows.append([line, *(fate(config, changes, to, target) for to, target in targets.values())])
    return markdown(["field", *targets], rows)


def family_formats() -> str:
    """What becomes of a network of each family, in miniature, in the formats that later families have."""
    targets = {name: TARGETS[name] for name in ("timm folder", "Hugging Face")}
    rows: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(peers, "build_reference", lambda *_: "not asked")
        for name, config in family_tables.miniatures().items():
            bundle = to_bundle(build_fresh(config))
            cells = [family_fate(bundle, Path(folder) / target, to) for to, target in targets.values()]
            rows.append([name, *cells])
    return markdown(["family", *targets], rows)


def family_fate(bundle: Bundle, target: Path, to: str) -> str:
    try:
        lost = convert.export(bundle, target, to).lost_fields
    except ExportRefused as error:
        field = re.search(r"field (\w+)", str(error))
        return f"refused: `{field[1]}`" if field else "refused"
    lost = [name for name in lost if name not in ("preprocessing", "heads", "image")]  # the miniature's own
    return f"sidecar: {', '.join(map(code, lost))}" if lost else "held"


TABLES: dict[str, Callable[[], str]] = {
    "vitrail models": lambda: model_table((224, 384)),
    "vitrail models, small": lambda: model_table((32, 64)),
    "vitrail models, families": family_tables.network_table,
    "weight families, side by side": family_tables.side_by_side,
    "public weights": public_table,
    "families of public weights": family_tables.terms_table,
    "preprocessing of public weights": family_tables.preprocessing_table,
    "families and formats": family_formats,
    "names of a ViT, Google": google_keys,
    "names of a ViT, PyTorch": torch_keys,
    "names of a backbone": trunk_keys,
    "names of a BiT": bit_keys,
    "fields of a ViT": lambda: field_table(model_config("ViT-Nano/4", depth=1, classes=10), FIELDS, TARGETS),
    "fields of a BiT": lambda: field_table(
        ResNetConfig(blocks=(1,), factor=0.5, image=(224, 224), classes=10), BIT_FIELDS, BIT_TARGETS
    ),
    "data sets": data_tables.set_table,
    "tasks of VTAB": data_tables.task_table,
    "original files": data_tables.file_table,
    "fields of a run": train_tables.run_table,
}


def tables() -> list[tuple[Path, str]]:
    return [(page, found[2]) for page in PAGES for found in MARKED.finditer(page.read_text("utf-8"))]


@pytest.mark.parametrize(
    ("page", "name"),
    [mark_slow(case) if case[1] in ("families and formats", "fields of a ViT") else case for case in tables()],
    ids=lambda value: id_of(value) if isinstance(value, Path) else value,
)
def test_tables_are_what_the_package_says(page: Path, name: str) -> None:
    shown = next(found[3] for found in MARKED.finditer(page.read_text("utf-8")) if found[2] == name)
    assert shown.splitlines() == TABLES[name]().splitlines(), "`python -m tests.test_docs` writes the tables again"


def test_every_table_is_shown() -> None:
    assert sorted(name for _, name in tables()) == sorted(TABLES)


def rewrite() -> None:
    """Writes the generated tables into the pages."""
    for page in PAGES:
        text = page.read_text("utf-8")
        page.write_text(MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[4]}", text), "utf-8")


if __name__ == "__main__":
    rewrite()
