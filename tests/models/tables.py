"""The tables of weight families in docs/models.md and docs/weights.md, from families.toml."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from vitrail.checkpoint.known_weights import PUBLIC, PublicWeights
from vitrail.cli.networks import FAMILY_OF, config_at
from vitrail.models.families import WEIGHT_FAMILIES, WeightFamily
from vitrail.models.vit_config import ViTConfig
from vitrail.models.vit_parts import Windows
from vitrail.models.zoo import ZOO, slug

TRANSFORMERS = [family for family in WEIGHT_FAMILIES.values() if family.name != "BiT"]
COLOURS = {0.5: "[-1, 1]", 0.485: "ImageNet", 0.48145466: "CLIP", 0.43: "satellite"}  # by the mean of red


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A network of a family as it is published, or as it is named where no weights are."""

    name: str
    config: ViTConfig
    entry: PublicWeights | None = None

    @property
    def size(self) -> str:
        """The letters between the family's name and the patch."""
        return self.name.rpartition("/")[0].rpartition("-")[2]


def list_members(family: WeightFamily) -> list[Member]:
    public = [entry for entry in PUBLIC if entry.family == family.name]
    named = [Member(name=e.network, config=cast(ViTConfig, e.config), entry=e) for e in public]
    return named or [Member(name=name, config=network.config) for name, network in family.networks.items()]


def join_distinct(members: Sequence[Member], describe: Callable[[Member], str]) -> str:
    """What all members have, or each kind, the most frequent first; with the sizes that it belongs to, if these are of
    no other kind."""
    kinds: dict[str, list[str]] = {}
    for member in members:
        kinds.setdefault(describe(member), []).append(member.size)
    texts: list[str] = []
    for text, sizes in sorted(kinds.items(), key=lambda kind: -len(kind[1])):
        others = {size for other, found in kinds.items() if other != text for size in found}
        own = "" if not texts or others & set(sizes) else f" ({', '.join(dict.fromkeys(sizes))})"
        texts.append(text + own)
    return "; ".join(texts)


def list_tokens(c: ViTConfig) -> str:
    many = f"{c.class_tokens} class" if c.class_tokens > 1 else "class"
    registers = "distillation" if c.head == "distilled" else f"{c.registers} registers"
    return ", ".join([many] * c.class_token + [registers] * bool(c.registers)) or "patches alone"


def list_positions(c: ViTConfig) -> str:
    bare = c.class_token and not c.position_prefix
    kinds = ["learned" + (", none for the class token" if bare else "")] if c.position == "learned" else []
    kinds += [] if c.rotary is None else ["rotary"]
    kinds += [] if c.position_bias == "none" else [{"decomposed": "decomposed bias"}.get(c.position_bias, "bias table")]
    return " + ".join(kinds)


def list_norms(c: ViTConfig) -> str:
    parts = {
        "before block 1": c.norm_stem == "tokens",
        "on the patches": c.norm_stem == "patches",
        "after each branch": c.norm_order == "res-post",
        "in attention": c.norm_inner_attention,
        "in the MLP": c.norm_inner_mlp,
        "after the mean": c.norm_after_pool,
        "none at the end": not c.norm_final,
        "LayerScale": bool(c.layer_scale),
    }
    kind = f"{'RMS' if c.norm == 'rms' else 'LN'} {c.norm_eps:.0e}".replace("e-0", "e-")
    return ", ".join([kind, *(name for name, there in parts.items() if there)])


def list_attention(c: ViTConfig) -> str:
    biases = "q, k, v" if c.qkv_bias and c.key_bias else "q, v" if c.qkv_bias else "none"
    windows = "" if c.windows is None else f"; windows of {c.windows.size}"
    return f"{biases}{windows}"


def name_mlp(c: ViTConfig) -> str:
    return "SwiGLU" if c.gated else {"erf": "GELU", "tanh": "GELU, tanh", "quick": "quick-GELU"}[c.gelu]


def name_readout(c: ViTConfig) -> str:
    pools = {"token": "class token", "mean": "mean", "token+mean": "class token and mean", "map": "attention pooling"}
    if c.head == "distilled":
        return "class and distillation token, one head each"
    return pools[c.pool] + (", projection" if c.projection else "") + (", neck" if c.neck else "")


def list_sizes(values: Iterable[int], sign: str = "") -> str:
    found = sorted(set(values))
    return ", ".join(f"{sign}{value}" for value in found) if len(found) < 4 else f"{sign}{found[0]} to {found[-1]}"


def list_terms(family: WeightFamily, members: Sequence[Member]) -> str:
    """Licence and access, of all that occur."""
    said = [(m.entry.licence, m.entry.access) for m in members if m.entry] or [(family.licence, family.access)]
    return "; ".join(dict.fromkeys(lic if access == "open" else f"{lic}, {access}" for lic, access in said))


def side_by_side() -> str:
    """Families of Transformers: what each one's networks are made of."""
    heads = ["family", "tokens", "positions", "norms", "biases, windows", "MLP", "read-out", "image", "patch", "sizes"]
    rows: list[list[str]] = []
    for family in TRANSFORMERS:
        members = list_members(family)
        parts = (list_tokens, list_positions, list_norms, list_attention, name_mlp, name_readout)
        cells = [join_distinct(members, lambda m, part=part: part(m.config)) for part in parts]
        plain = [m for m in members if m.config.backbone is None]
        image, patch = list_sizes(m.config.image[0] for m in members), list_sizes(m.config.patch[0] for m in plain)
        sizes = ", ".join(dict.fromkeys(m.size for m in members))
        rows.append([family.name, *cells, image, patch, sizes, list_terms(family, members)])
    return markdown([*heads, "licence"], rows)


def network_table() -> str:
    """The networks of weight families, each at its own size."""
    heads = ["network", "slug", "width", "depth", "MLP", "heads", "parameters", "image", "tokens", "GMACs"]
    rows: list[list[str]] = []
    for name in FAMILY_OF:
        side = ZOO[name].image[0]
        c = cast(ViTConfig, config_at(name, side, 1000))
        shape = [c.width, c.depth, c.mlp_width, c.heads, f"{c.parameters:,}", side, f"{c.tokens:,}"]
        rows.append([name, f"`{slug(name)}`", *map(str, shape), f"{c.macs / 1e9:,.2f}"])
    return markdown(heads, rows, right=8)


def terms_table() -> str:
    """Families with an example of their public weights, and what may be done with them."""
    rows: list[list[str]] = []
    for family in WEIGHT_FAMILIES.values():
        members = [entry for entry in PUBLIC if entry.family == family.name]
        example = f"`{members[0].name}`" if members else "none on a hub"
        terms = "; ".join(dict.fromkeys(f"{e.licence}, {e.access}" for e in members)) or f"{family.licence}, open"
        paper = f"[{family.year}](https://arxiv.org/abs/{family.arxiv})"
        rows.append([family.name, family.about, example, str(len(members)), terms, paper])
    return markdown(["family", "about", "for example", "weights", "licence, access", "paper"], rows)


def preprocessing_table() -> str:
    """How images are prepared for public weights, and how positions are resampled."""
    rows: list[list[str]] = []
    for family in TRANSFORMERS:
        members = list_members(family)
        public = [member for member in members if member.entry]
        cells = [join_distinct(public, part) if public else "" for part in (name_colours, name_crop)]
        rows.append([family.name, *cells, join_distinct(members, name_resample)])
    return markdown(["family", "pixels", "crop", "positions"], rows)


def name_colours(member: Member) -> str:
    assert member.entry is not None
    return COLOURS[member.entry.mean[0]]


def name_crop(member: Member) -> str:
    """The share of the resized image that is kept."""
    assert member.entry is not None
    assert member.entry.interpolation == "bicubic"
    return "squashed" if member.entry.crop is None else f"{100 * member.entry.crop:.0f} %"


def name_resample(member: Member) -> str:
    if member.config.position == "learned":
        return f"`{member.config.position_resample}`"
    return "nothing to resample" if member.config.position_bias == "none" else "`bilinear`"


def miniatures() -> dict[str, ViTConfig]:
    """A small network of each family, with the parts of its first one that has weights, or of its first."""
    found: dict[str, ViTConfig] = {}
    for family in TRANSFORMERS:
        c = list_members(family)[0].config
        side = 4 * c.patch[0]
        small: dict[str, Any] = {"width": 48, "depth": 2, "mlp_width": 96, "heads": 3, "image": (side, side)}
        small |= {"classes": 10} if c.classes and family.weights else {"classes": 0, "head": "none"}
        small |= {"map_heads": 4} if c.map_heads else {}
        small |= {"windows": Windows(size=2, whole=(1,))} if c.windows else {}
        found[family.name] = replace(c, **small)
    return found


def families_with(field: str) -> list[str]:
    """The families in which a network has another value of a field than the paper's."""
    default = next(one.default for one in fields(ViTConfig) if one.name == field)
    return [f.name for f in TRANSFORMERS if any(getattr(m.config, field) != default for m in list_members(f))]


def markdown(heads: Sequence[str], rows: Iterable[Sequence[Any]], *, right: int = 0) -> str:
    """A table; the last `right` columns hold numbers."""
    rule = ["---"] * (len(heads) - right) + ["---:"] * right
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, rule, *rows))
