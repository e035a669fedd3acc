"""Draws the network as data flow, with every shape of ViT-L/32 at 256 px: docs/figures/network.svg.

    python docs/figures/network.py

Plain text out of plain Python: no dependencies, no random numbers, the same file every time. The numbers are computed
from the letters below; tests/test_docs.py holds them against the package's own walk.
"""

import math
import re
from collections.abc import Iterable
from pathlib import Path

TARGET = Path(__file__).with_suffix(".svg")

# ViT-L/32 at 256 px, in the paper's letters.
SIDE, C, P = 256, 3, 32
D, L, M, HEADS, K = 1024, 24, 4096, 16, 1000
GRID = SIDE // P
N = GRID * GRID
T = N + 1
INSIDE = P * P * C
HEAD_WIDTH = D // HEADS
PARAMETERS = INSIDE * D + D + D + T * D + L * (4 * D * D + 2 * D * M + 9 * D + M) + 2 * D + D * K + K
MACS = N * INSIDE * D + L * (4 * T * D * D + 2 * T * T * D + 2 * T * D * M) + D * K

WIDTH, HEIGHT = 1200, 1480
LEFT, RIGHT = 62.0, 786.0  # of the main column
TOP, BASE = 734.0, 1190.0  # of the block's window; the residual stream runs along its base
SIDE_X, SIDE_W = 832.0, 328.0  # of the side column
SLOT = (RIGHT - LEFT) / T  # for one token
BAR = SLOT - 1.8

NIGHT, STONE, WALL, LEAD, CREAM, DIM = "#131629", "#1c2039", "#171a30", "#07080f", "#f6efdc", "#b9b7c9"
GOLD, AMBER, RUBY, ROSE, COBALT, SKY = "#f5bd3d", "#e8892b", "#c8283c", "#e46a86", "#2a52be", "#5aa9d6"
EMERALD, LEAF, VIOLET, PEARL = "#178a5b", "#7fb04a", "#7a4fa3", "#f7e9bd"

Point = tuple[float, float]
Glass = tuple[list[Point], str]  # an outline and its colour

DEFINITIONS = """<linearGradient id="light" x1="0" y1="0" x2="0.3" y2="1">
<stop offset="0" stop-color="#fff" stop-opacity="0.26"/><stop offset="0.5" stop-color="#fff" stop-opacity="0"/>
<stop offset="1" stop-color="#000" stop-opacity="0.22"/></linearGradient>
<radialGradient id="glow" cx="0.66" cy="0.33" r="0.9"><stop offset="0" stop-color="#fff6cf" stop-opacity="0.34"/>
<stop offset="0.45" stop-color="#fff6cf" stop-opacity="0"/><stop offset="1" stop-color="#060818" stop-opacity="0.4"/>
</radialGradient>
<radialGradient id="night" cx="0.32" cy="0.15" r="1.1"><stop offset="0" stop-color="#232848"/>
<stop offset="1" stop-color="#131629"/></radialGradient>
<pattern id="quarry" width="26" height="38" patternUnits="userSpaceOnUse">
<path d="M0 19 L13 0 L26 19 L13 38 Z" fill="#232a50" fill-opacity="0.4" stroke="#141830" stroke-width="1.4"/></pattern>
<marker id="tip" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="11" markerHeight="11" markerUnits="userSpaceOnUse"
orient="auto"><path d="M0 0 L10 5 L0 10 Z" fill="#f6efdc"/></marker>"""


def num(value: float) -> str:
    """A number as short as it can be written."""
    return f"{value:.2f}".rstrip("0").rstrip(".") or "0"


def mixed(a: str, b: str, share: float) -> str:
    """A colour between two."""
    return "#" + "".join(f"{round(x + (y - x) * share):02x}" for x, y in zip(rgb(a), rgb(b), strict=True))


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def turned(centre: Point, radius: float, turn: float) -> Point:
    return (centre[0] + radius * math.cos(math.tau * turn), centre[1] + radius * math.sin(math.tau * turn))


def sizes(*numbers: int) -> str:
    """A shape as `vitrail trace` prints it, marked to stand out."""
    return f"[{' × '.join(str(number) for number in numbers)}]"


def marked(text: str, strong: str) -> str:
    """*italic*, _{below}, ^{above} and [strong] as tspans."""
    text = re.sub(r"\*([^*]+)\*", r'<tspan font-style="italic">\1</tspan>', text)
    for sign, shift in (("_", 0.28), ("\\^", -0.34)):
        small = (
            f'<tspan dy="{shift}em" font-size="72%">\\1</tspan><tspan dy="{-shift}em" font-size="72%">&#8203;</tspan>'
        )
        text = re.sub(sign + r"\{([^}]+)\}", small, text)
    return re.sub(r"\[([^\]]+)\]", rf'<tspan fill="{strong}" font-weight="bold">\1</tspan>', text)


class Canvas:
    """SVG elements in the order they are painted."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def add(self, tag: str, **attributes: object) -> None:
        values = {name.replace("_", "-"): num(v) if isinstance(v, float) else v for name, v in attributes.items()}
        self.parts.append("<" + " ".join([tag, *(f'{name}="{value}"' for name, value in values.items())]) + "/>")

    def rect(self, x: float, y: float, width: float, height: float, fill: str, **rest: object) -> None:
        self.add("rect", x=float(x), y=float(y), width=float(width), height=float(height), fill=fill, **rest)

    def polygon(self, outline: Iterable[Point], fill: str, lead: float) -> None:
        points = " ".join(f"{num(x)},{num(y)}" for x, y in outline)
        self.add("polygon", points=points, fill=fill, stroke=LEAD, stroke_width=lead, stroke_linejoin="round")

    def path(self, d: str, fill: str = "none", **rest: object) -> None:
        self.add("path", d=d, fill=fill, **rest)

    def line(self, *way: Point, colour: str = CREAM, width: float = 2.6, **rest: object) -> None:
        d = "M" + " L".join(f"{num(x)} {num(y)}" for x, y in way)
        self.path(d, "none", stroke=colour, stroke_width=width, stroke_linejoin="round", **rest)

    def arrow(self, *way: Point, colour: str = CREAM, width: float = 2.6) -> None:
        self.line(*way, colour=colour, width=width, marker_end="url(#tip)")

    def frames(self, lead: float, boxes: Iterable[tuple[float, float, float, float]]) -> None:
        """Lead around many pieces of glass, as one path."""
        d = "".join(f"M{num(x)} {num(y)}h{num(w)}v{num(h)}h{num(-w)}z" for x, y, w, h in boxes)
        self.path(d, stroke=LEAD, stroke_width=lead)

    def pane(self, x: float, y: float, width: float, height: float, colour: str, lead: float = 3) -> None:
        self.rect(x, y, width, height, colour, rx=4, stroke=LEAD, stroke_width=lead)
        self.rect(x, y, width, height, "url(#light)", rx=4)

    def plus(self, x: float, y: float, radius: float = 15) -> None:
        """A residual sum."""
        self.add("circle", cx=float(x), cy=float(y), r=radius, fill=GOLD, stroke=LEAD, stroke_width=radius / 5)
        arm = radius * 0.54
        for dx, dy in ((arm, 0.0), (0.0, arm)):
            self.line((x - dx, y - dy), (x + dx, y + dy), colour=LEAD, width=radius / 5)

    def text(
        self,
        x: float,
        y: float,
        content: str,
        *,
        size: float = 18,
        fill: str = CREAM,
        at: str = "start",
        on: str = GOLD,
    ) -> None:
        """A line of marked text; `at` is its anchor, `on` the colour of what is strong in it."""
        where = "" if at == "start" else f' text-anchor="{at}"'
        body = marked(content, on)
        self.parts.append(f'<text x="{num(x)}" y="{num(y)}" font-size="{size}" fill="{fill}"{where}>{body}</text>')

    def note(self, x: float, y: float, content: str, *, at: str = "start") -> None:
        self.text(x, y, content, size=16, fill=DIM, at=at)

    def whole(self, x: float, y: float, side: float) -> None:
        """The image, uncut."""
        self.add("use", href="#picture", x=float(x), y=float(y), width=float(side), height=float(side))

    def piece(self, patch: int, x: float, y: float, width: float, height: float) -> None:
        """One patch of the image, cut to a rectangle."""
        row, column = divmod(patch, GRID)
        self.parts.append(
            f'<svg x="{num(x)}" y="{num(y)}" width="{num(width)}" height="{num(height)}" '
            f'viewBox="{P * column} {P * row} {P} {P}" preserveAspectRatio="xMidYMid slice">'
            f'<use href="#picture" width="{SIDE}" height="{SIDE}"/></svg>'
        )


# The image that is cut: a sun over mountains, water and meadows, in 256 x 256 units, from back to front.

LANDSCAPE: list[Glass] = [
    ([(-4, 150), (34, 96), (62, 128), (62, 190), (-4, 190)], "#5b3f8c"),
    ([(34, 96), (62, 128), (48, 132), (38, 120), (30, 128), (22, 113)], PEARL),
    ([(40, 190), (92, 88), (116, 126), (116, 190)], "#7a4fa3"),
    ([(116, 126), (154, 178), (154, 190), (116, 190)], "#5f3f93"),
    ([(92, 88), (116, 126), (104, 124), (94, 112), (86, 122), (77, 117)], PEARL),
    ([(136, 190), (206, 128), (260, 182), (260, 190)], "#8d5fae"),
    ([(206, 128), (260, 182), (260, 160), (236, 140)], "#a274bd"),
    ([(-4, 178), (70, 182), (120, 190), (120, 206), (-4, 204)], "#1f7fa8"),
    ([(120, 184), (260, 178), (260, 200), (120, 206)], "#3fb0c4"),
    ([(146, 184), (196, 182), (186, 201), (152, 203)], "#f2c75c"),
    ([(-4, 204), (60, 196), (120, 206), (104, 232), (-4, 236)], "#2f8f55"),
    ([(120, 206), (190, 196), (260, 204), (260, 232), (104, 232)], "#5aa64a"),
    ([(-4, 236), (104, 232), (132, 260), (-4, 260)], "#8fbf4f"),
    ([(104, 232), (260, 232), (260, 260), (132, 260)], "#1f7a4d"),
    ([(214, 196), (226, 196), (229, 246), (211, 246)], "#5a2d1e"),
    ([(196, 206), (220, 138), (244, 206)], "#0f6b46"),
    ([(220, 138), (244, 206), (220, 206)], "#15845a"),
    ([(30, 206), (38, 206), (40, 242), (28, 242)], "#5a2d1e"),
    ([(16, 214), (34, 166), (52, 214)], "#c8283c"),
    ([(34, 166), (52, 214), (34, 214)], "#e04a4f"),
]


def scenery() -> list[Glass]:
    """Pieces of glass from back to front."""
    sun = (168.0, 84.0)
    skies = ("#1f3f9e", "#2f62c9", "#2a52be", "#3c7fd0", "#1f3f9e", "#4f9ad8", "#2f62c9", "#3c7fd0")
    rays = [[sun, turned(sun, 400, i / 24), turned(sun, 400, (i + 1) / 24)] for i in range(24)]
    out: list[Glass] = [(ray, skies[i % 8]) for i, ray in enumerate(rays)]
    for inner, outer, colours in ((38, 58, (AMBER, "#f2a03a")), (0, 38, (GOLD, "#f9d266"))):
        for i in range(12):
            ring = [turned(sun, outer, (i + s) / 12) for s in (0, 0.5, 1)]
            ring += [turned(sun, inner, (i + s) / 12) for s in (1, 0)]
            out.append((ring, colours[i % 2]))
    return out + LANDSCAPE


def picture(glass: list[Glass]) -> str:
    canvas = Canvas()
    for outline, colour in glass:
        canvas.polygon(outline, colour, 2)
    canvas.rect(0, 0, SIDE, SIDE, "url(#glow)")
    return f'<symbol id="picture" viewBox="0 0 {SIDE} {SIDE}">{"".join(canvas.parts)}</symbol>'


def mean_colour(patch: int, glass: list[Glass]) -> str:
    """The mean of a patch's pixels, by 8 x 8 samples."""
    row, column = divmod(patch, GRID)
    total = [0, 0, 0]
    for i in range(64):
        spot = (P * column + 4 * (i % 8) + 2, P * row + 4 * (i // 8) + 2)
        top = next((colour for outline, colour in reversed(glass) if inside(spot, outline)), COBALT)
        total = [t + c for t, c in zip(total, rgb(top), strict=True)]
    return "#" + "".join(f"{t // 64:02x}" for t in total)


def inside(point: Point, outline: list[Point]) -> bool:
    (x, y), odd = point, False
    for (ax, ay), (bx, by) in zip(outline, outline[1:] + outline[:1], strict=True):
        if (ay > y) != (by > y) and x < ax + (y - ay) * (bx - ax) / (by - ay):
            odd = not odd
    return odd


# The main column: image, patches, tokens, blocks, head.


def cutting(c: Canvas) -> None:
    """The image, and the image cut."""
    top, side, start, cell, step = 128.0, 236.0, 428.0, 26.2, 31.2
    c.whole(LEFT, top, side)
    c.rect(LEFT, top, side, side, "none", stroke=LEAD, stroke_width=7)
    c.rect(LEFT - 4, top - 4, side + 8, side + 8, "none", stroke=GOLD, stroke_width=1.2)
    places = [(start + i % GRID * step, top - 4 + i // GRID * step) for i in range(N)]
    for i, (x, y) in enumerate(places):
        c.piece(i, x, y, cell, cell)
    c.frames(2.2, [(x, y, cell, cell) for x, y in places])
    middle, cut = top + side / 2, (LEFT + side + start) / 2
    c.arrow((LEFT + side + 18, middle), (start - 18, middle))
    c.text(cut, middle - 14, f"cut, *P* = {P}", at="middle")
    c.note(cut, middle + 28, "raster order", at="middle")
    c.text(LEFT, top + side + 34, f"image *H × W × C*\u2003{sizes(SIDE, SIDE, C)}")
    c.text(start, top + side + 34, f"*N* = *HW*/*P*^{{2}} = {N} patches")


def embedding(c: Canvas, colours: list[str]) -> None:
    """Patches, E, class token, positions (Eq. 1)."""
    y = 440.0
    c.text(LEFT + SLOT, y, "patches, flattened: *x*_{p}")
    c.text(RIGHT, y, f"*N* × *P*^{{2}}*C*\u2003{sizes(N, INSIDE)}", at="end")
    y += 12
    for i in range(N):
        c.piece(i, LEFT + SLOT * (i + 1), y, BAR, 30)
    c.frames(1.1, [(LEFT + SLOT * (i + 1), y, BAR, 30) for i in range(N)])
    y += 36
    left, right = LEFT + SLOT, RIGHT - 1.8
    c.polygon([(left, y), (right, y), (right - 46, y + 40), (left + 46, y + 40)], COBALT, 3)
    text = f"*E*: one linear map for every patch, *P*^{{2}}*C* × *D*\u2003{sizes(INSIDE, D)}"
    c.text((left + right) / 2, y + 26, text, at="middle", on=PEARL)
    y += 46
    tokens(c, y, colours, 44)
    c.text(LEFT - 4, y - 13, "*x*_{class}", fill=GOLD)
    c.path(f"M{num(LEFT + SLOT - 0.9)} {num(y + 47)} l-5 8 h10 z", DIM)
    c.note(LEFT, y + 72, "registers stand here, where a network has them (none in this one)")
    c.text(RIGHT, y + 72, f"*x*_{{p}}*E*: *N × D*\u2003{sizes(N, D)}", at="end")
    y += 90
    c.plus(LEFT + 262, y + 8)
    c.text(LEFT + 288, y + 14, "positions *E*_{pos}, learned")
    c.text(RIGHT, y + 14, f"(*N* + 1) × *D*\u2003{sizes(T, D)}", at="end")
    y += 30
    for i in range(T):
        across, down = (i - 1) % GRID / (GRID - 1), (i - 1) // GRID / (GRID - 1)
        colour = mixed(mixed(VIOLET, SKY, across), mixed(RUBY, PEARL, across), down) if i else GOLD
        c.rect(LEFT + SLOT * i, y, BAR, 24, colour)
    c.frames(1, [(LEFT + SLOT * i, y, BAR, 24) for i in range(T)])
    y += 48
    c.text(LEFT, y, "= *z*_{0}, the tokens (Eq. 1)")
    c.text(RIGHT, y, f"*T × D*\u2003{sizes(T, D)}", at="end")
    c.line((LEFT - 6, y - 6), (34, y - 6), (34, BASE), (LEFT - 12, BASE), colour=GOLD, width=5)


def tokens(c: Canvas, y: float, colours: list[str], height: float, faded: float = 0.0) -> None:
    """T vectors: the class token's in gold, each patch's in its colour, as five cells of glass."""
    for i, colour in enumerate([GOLD, *colours]):
        shade = mixed(colour, STONE, faded) if i else colour
        c.rect(LEFT + SLOT * i, y, BAR, height, shade)
        for cell in range(5):
            if light := (0, 0.22, 0.06, 0.3, 0.12)[(cell * 3 + i * 2) % 5]:
                c.rect(LEFT + SLOT * i, y + cell * height / 5, BAR, height / 5, mixed(shade, PEARL, light))
    c.frames(1.1, [(LEFT + SLOT * i, y, BAR, height) for i in range(T)])


def lancet(x: float, base: float, width: float, spring: float) -> str:
    """A pointed window: sides up to `spring`, then two arcs that meet."""
    radius = 0.7 * width
    rise = math.sqrt(radius**2 - (radius - width / 2) ** 2)
    arc = f"A{num(radius)} {num(radius)} 0 0 1"
    return (
        f"M{num(x)} {num(base)} V{num(spring)} {arc} {num(x + width / 2)} {num(spring - rise)} "
        f"{arc} {num(x + width)} {num(spring)} V{num(base)} Z"
    )


def block(c: Canvas) -> None:
    """One of the L layers: two lancets, one for each equation, on the stream that runs below them."""
    width, spring, centre = 342.0, TOP + 232, ((LEFT + RIGHT) / 2, TOP + 50)
    lefts = (LEFT + 8, RIGHT - 8 - width)
    c.rect(LEFT - 12, TOP - 4, RIGHT - LEFT + 24, BASE - TOP + 52, WALL, rx=10, stroke=GOLD, stroke_width=1.4)
    for x in lefts:
        window = lancet(x, BASE - 34, width, spring)
        c.path(window, STONE, stroke=LEAD, stroke_width=8)
        c.path(window, "url(#quarry)", stroke=GOLD, stroke_width=1.2)
    for i in range(12):  # the oculus between the arches says how often
        petal = [turned(centre, 44, (i + s) / 12) for s in (0, 0.5, 1)] + [centre]
        c.polygon(petal, (VIOLET, RUBY, COBALT, EMERALD)[i % 4], 2)
    c.add("circle", cx=centre[0], cy=centre[1], r=31, fill=NIGHT, stroke=LEAD, stroke_width=3)
    c.text(centre[0], centre[1] - 3, "*L* ×", size=19, at="middle")
    c.text(centre[0], centre[1] + 20, sizes(L), size=20, at="middle")
    c.line((LEFT - 12, BASE), (RIGHT + 12, BASE), colour=GOLD, width=5)
    heads_as_glass(c, lefts[0] + width / 2, spring - 192)
    mlp_to_scale(c, lefts[1] + width / 2, spring - 150)
    attention = (
        f"MSA, *k* = {HEADS} heads of *D*_{{h}} = {HEAD_WIDTH}",
        f"*q k v*\u2003{sizes(3, HEADS, T, HEAD_WIDTH)}",
    )
    mlp = ("MLP: Dense, GELU, Dense", f"*D → M → D*\u2003{sizes(D)} → {sizes(M)} → {sizes(D)}")
    sublayer(c, lefts[0], width, spring, RUBY, (*attention, "*z′*_{ℓ} = MSA(LN(*z*)) + *z*"))
    sublayer(c, lefts[1], width, spring, EMERALD, (*mlp, "*z*_{ℓ} = MLP(LN(*z′*)) + *z′*"))
    c.text(LEFT - 4, BASE + 30, "*z*_{ℓ−1}")
    c.note(lefts[0] + width / 2 + 6, BASE + 30, "Eq. 2", at="middle")
    c.text(centre[0], BASE + 30, "*z′*_{ℓ}", at="middle")
    c.note(lefts[1] + width / 2 + 6, BASE + 30, "Eq. 3", at="middle")
    c.text(RIGHT + 4, BASE + 30, "*z*_{ℓ}", at="end")


def sublayer(c: Canvas, x: float, width: float, spring: float, colour: str, lines: tuple[str, str, str]) -> None:
    """A branch off the stream: norm, work, and back into the sum."""
    up, down, shelf, tall, middle = x + 52, x + width - 40, spring + 8, 78, x + width / 2
    c.arrow((up, BASE), (up, BASE - 58))
    c.pane(x + 18, BASE - 98, 68, 38, VIOLET)
    c.text(up, BASE - 72, "LN", at="middle")
    c.arrow((up, BASE - 100), (up, shelf + tall + 4))
    c.pane(x + 18, shelf, width - 36, tall, colour)
    c.text(middle, shelf + 31, lines[0], at="middle")
    c.text(middle, shelf + 60, lines[1], at="middle", size=17, on=PEARL)
    c.note((x + 92 + down) / 2, BASE - 72, lines[2], at="middle")
    c.arrow((down, shelf + tall), (down, BASE - 17))
    c.plus(down, BASE)


def heads_as_glass(c: Canvas, cx: float, top: float) -> None:
    """Sixteen heads as sixteen small tables of weights, some local, some global (Figure 7)."""
    cells, side, step = 5, 25.0, 29.0
    start = cx - (3 * step + side) / 2
    for head in range(HEADS):
        x, y = start + head % 4 * step, top + head // 4 * step
        reach = 0.45 + 0.28 * (head * 7 % 16)
        for i in range(cells):
            weights = [
                math.exp(-((i - j) ** 2) / (2 * reach**2)) + 0.07 * ((i + j * 3 + head) % 3) for j in range(cells)
            ]
            for j, weight in enumerate(weights):
                colour = mixed("#3a1030", (RUBY, AMBER, ROSE, GOLD)[head % 4], weight / max(weights))
                c.rect(x + j * side / cells, y + i * side / cells, side / cells, side / cells, colour)
        c.frames(2, [(x, y, side, side)])
    c.text(cx, top + 144, f"*A* = softmax(*qk*^{{T}}/√*D*_{{h}})\u2003{sizes(HEADS, T, T)}", size=17, at="middle")


def mlp_to_scale(c: Canvas, cx: float, y: float) -> None:
    """D to M and back, drawn to scale: M is four times D."""
    narrow, wide, tall = 42.0, 42.0 * M / D, 54.0
    greens = ("#0f5f43", EMERALD, LEAF, "#bcd36a", LEAF, EMERALD, "#0f5f43", "#2fa36b")
    for half, (above, below) in enumerate(((narrow, wide), (wide, narrow))):
        at = y + half * (tall + 14)
        for i in range(8):
            edge = [(cx + above * (s / 8 - 0.5), at) for s in (i, i + 1)]
            edge += [(cx + below * (s / 8 - 0.5), at + tall) for s in (i + 1, i)]
            c.polygon(edge, greens[(i + 3 * half) % 8], 1.6)
    c.rect(cx - wide / 2 - 4, y + tall, wide + 8, 14, GOLD, stroke=LEAD, stroke_width=2)
    c.text(cx, y - 10, "*D*", size=17, at="middle")
    c.text(cx + wide / 2 + 12, y + tall + 13, "*M*", size=17)
    c.text(cx + narrow / 2 + 12, y + 2 * tall + 18, "*D*", size=17)


def head(c: Canvas, colours: list[str]) -> None:
    """The class token's row, the last norm, the logits (Eq. 4)."""
    y = BASE + 80
    c.arrow((RIGHT - 24, BASE + 50), (RIGHT - 24, y + 18), colour=GOLD, width=5)
    c.text(LEFT, y + 12, "*z*_{L}: only the class token's row is read")
    c.text(RIGHT - 44, y + 12, f"*T × D*\u2003{sizes(T, D)}", at="end")
    tokens(c, y + 24, colours, 34, faded=0.62)
    x, row = LEFT + BAR / 2, y + 102
    c.arrow((x, y + 60), (x, row + 18), (x + 40, row + 18), colour=GOLD)
    c.pane(LEFT + 52, row, 62, 38, VIOLET)
    c.text(LEFT + 83, row + 25, "LN", at="middle")
    c.arrow((LEFT + 116, row + 19), (LEFT + 152, row + 19))
    c.text(LEFT + 164, row + 25, f"*y*: *D*\u2003{sizes(D)} (Eq. 4)")
    c.arrow((LEFT + 322, row + 19), (LEFT + 352, row + 19))
    c.pane(LEFT + 360, row, 150, 38, COBALT)
    c.text(LEFT + 435, row + 25, "head *D × K*", at="middle")
    c.note(LEFT + 435, row + 62, "zero at the start (3.2)", at="middle")
    c.arrow((LEFT + 512, row + 19), (LEFT + 542, row + 19))
    for i in range(20):
        high = 46 if i == 7 else 6 + 28 * abs(math.sin(1.7 * i + 0.4)) ** 3
        c.rect(LEFT + 554 + 6 * i, row + 38 - high, 4.4, high, GOLD if i == 7 else SKY)
    c.text(RIGHT, row + 62, f"logits *K*\u2003{sizes(K)}", at="end")


# The side column: what a hybrid and an axial network do otherwise, and the letters.


def panel(c: Canvas, y: float, height: float, title: str, anchor: str) -> None:
    c.rect(SIDE_X, y, SIDE_W, height, WALL, rx=10, stroke=GOLD, stroke_width=1.4)
    c.text(SIDE_X + 18, y + 32, f"[{title}]", size=20)
    c.note(SIDE_X + SIDE_W - 18, y + 32, anchor, at="end")


def hybrid(c: Canvas) -> None:
    """A ResNet in front of E (3.1): the map shrinks as the channels grow."""
    y, cx = 108.0, SIDE_X + SIDE_W / 2
    panel(c, y, 462, "Hybrid", "3.1")
    c.text(SIDE_X + 18, y + 60, "A ResNet-50 stands before the cut;", size=17)
    c.text(SIDE_X + 18, y + 82, "its feature map is cut at *P* = 1.", size=17)
    c.whole(cx - 46, y + 102, 92)
    c.rect(cx - 46, y + 102, 92, 92, "none", stroke=LEAD, stroke_width=4)
    c.text(SIDE_X + SIDE_W - 18, y + 154, sizes(SIDE, SIDE, C), size=15.5, at="end")
    c.arrow((cx, y + 198), (cx, y + 214))
    widths, colours = (112, 92, 74, 58, 46, 40), (SKY, COBALT, VIOLET, ROSE, RUBY)
    for i, colour in enumerate(colours):
        at, above, below = y + 218 + 27 * i, widths[i], widths[i + 1]
        c.polygon(
            [(cx - above / 2, at), (cx + above / 2, at), (cx + below / 2, at + 24), (cx - below / 2, at + 24)],
            colour,
            2.5,
        )
        c.note(SIDE_X + 18, at + 18, f"stage {i}" if i else "root /4")
        side = SIDE // 4 // 2 ** max(i - 1, 0)
        c.text(SIDE_X + SIDE_W - 18, at + 18, sizes(side, side, 128 * 2**i if i else 64), size=15.5, at="end")
    c.arrow((cx, y + 353), (cx, y + 371))
    c.text(cx, y + 391, f"*N* = {N} positions of 1 × 1, *E*: {sizes(2048, D)}", at="middle", size=16)
    c.note(SIDE_X + 18, y + 419, "(i) /32: stages (3, 4, 6, 3), as drawn")
    c.note(SIDE_X + 18, y + 441, "(ii) /16: stages (3, 4, 9), no stage 4")


def axial(c: Canvas, colours: list[str]) -> None:
    """Rows, then columns (D.6)."""
    y, cell, query = 594.0, 15.5, (3, 4)
    panel(c, y, 426, "Axial", "D.6")
    c.text(SIDE_X + 18, y + 60, "Tokens stay on their grid. A block is two:", size=17)
    c.text(SIDE_X + 18, y + 82, "along the rows, then along the columns.", size=17)
    side, top = cell * GRID, y + 100
    for axis, x in (("row", SIDE_X + 24), ("column", SIDE_X + SIDE_W - 24 - side)):
        for i, colour in enumerate(colours):
            row, column = divmod(i, GRID)
            seen = row == query[0] if axis == "row" else column == query[1]
            fill = mixed(colour, PEARL, 0.15) if seen else mixed(colour, STONE, 0.66)
            c.rect(x + column * cell, top + row * cell, cell, cell, fill, stroke=LEAD, stroke_width=1.5)
        at = (x + query[1] * cell, top + query[0] * cell)
        box = (x, at[1], side, cell) if axis == "row" else (at[0], top, cell, side)
        c.rect(*box, "none", stroke=GOLD, stroke_width=2)
        c.add("circle", cx=at[0] + cell / 2, cy=at[1] + cell / 2, r=4.2, fill=LEAD)
        c.note(x + side / 2, top + side + 22, axis, at="middle")
    c.arrow((SIDE_X + 34 + side, top + side / 2), (SIDE_X + SIDE_W - 34 - side, top + side / 2))
    at, stream = top + side + 38, SIDE_X + SIDE_W - 44
    c.line((stream, at - 6), (stream, at + 118), colour=GOLD, width=3)
    for i, label in enumerate(("LN, MSA over a row", "LN, MLP", "LN, MSA over a column", "LN, MLP")):
        c.pane(SIDE_X + 24, at + 29 * i, SIDE_W - 88, 25, EMERALD if i % 2 else RUBY, 2.5)
        c.text(SIDE_X + SIDE_W / 2 - 20, at + 29 * i + 18, label, size=16, at="middle")
        c.plus(stream, at + 29 * i + 12.5, 9)
    c.note(SIDE_X + 18, at + 148, "No class token: the mean is read instead.")


def letters(c: Canvas) -> None:
    y, right = 1044.0, SIDE_X + SIDE_W - 18
    panel(c, y, 388, "The letters", "ViT-L/32")
    rows: tuple[tuple[str, str, object], ...] = (
        ("*H, W, C*", "image", f"{SIDE}, {SIDE}, {C}"),
        ("*P*", "patch side", P),
        ("*N*", "patches", N),
        ("*T*", "tokens, all", T),
        ("*D*", "width", D),
        ("*L*", "depth, layers", L),
        ("*k*", "heads", HEADS),
        ("*D*_{h}", "width of a head", HEAD_WIDTH),
        ("*M*", "MLP width", M),
        ("*K*", "classes", K),
    )
    for i, (letter, meaning, value) in enumerate(rows):
        c.text(SIDE_X + 18, y + 62 + 25 * i, letter, size=17)
        c.text(SIDE_X + 92, y + 62 + 25 * i, meaning, size=17, fill=DIM)
        c.text(right, y + 62 + 25 * i, f"[{value}]", size=17, at="end")
    c.line((SIDE_X + 18, y + 308), (right, y + 308), colour="#4a4e6b", width=1)
    for i, (label, value) in enumerate((("parameters", PARAMETERS), ("multiply-adds", MACS))):
        c.note(SIDE_X + 18, y + 336 + 25 * i, label)
        c.text(right, y + 336 + 25 * i, f"{value:,}", size=16, fill=GOLD, at="end")


def svg() -> str:
    """The whole file."""
    glass = scenery()
    colours = [mean_colour(patch, glass) for patch in range(N)]
    c = Canvas()
    c.rect(0, 0, WIDTH, HEIGHT, "url(#night)", rx=18)
    c.rect(14, 14, WIDTH - 28, HEIGHT - 28, "none", rx=12, stroke=GOLD, stroke_opacity=0.55, stroke_width=1.4)
    c.text(LEFT - 6, 66, "[The Vision Transformer]", size=34, on=CREAM)
    command = f"vitrail trace ViT-L/32 --image-size {SIDE}"
    c.text(LEFT - 6, 96, f"ViT-L/32, with the shapes that “{command}” prints", fill=DIM)
    cutting(c)
    embedding(c, colours)
    block(c)
    head(c, colours)
    hybrid(c)
    axial(c, colours)
    letters(c)
    label = (
        f"Data flow of ViT-L/32 at {SIDE} px: image {SIDE}x{SIDE}x{C}, patches {N}x{INSIDE}, embedded by E to "
        f"{N}x{D}, class token and positions make {T}x{D}, {L} blocks of attention and MLP, norm, head, {K} logits."
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{label}" font-family="Georgia, \'Times New Roman\', \'Liberation Serif\', serif">\n'
        f"<defs>{DEFINITIONS}\n{picture(glass)}</defs>\n" + "\n".join(c.parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    TARGET.write_text(svg(), encoding="utf-8")
