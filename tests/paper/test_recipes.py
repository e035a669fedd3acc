"""Tables 3 and 4 as they are printed, against the recipes: a test a row. B.1.1."""

import pytest

from vitrail.data.transforms.crop import InceptionCrop, ResizeCrop
from vitrail.data.transforms.policy import RandAugment
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import model_config
from vitrail.optim.schedules import learning_rate
from vitrail.recipes.registry import list_recipes, load_recipe
from vitrail.recipes.run_overrides import find_sweep_grid, with_data
from vitrail.train.config import Run

JFT, I21K, IMAGENET = 303_000_000, 14_197_122, 1_281_167  # images

# recipe, network, images, epochs, base learning rate, decay, weight decay, dropout, thousands of steps at batch 4096
TABLE3 = [
    ("vit-b16-jft", "ViT-B/16", JFT, 7, 8e-4, "linear", 0.1, 0.0, 518),
    ("vit-b32-jft", "ViT-B/32", JFT, 7, 8e-4, "linear", 0.1, 0.0, 518),
    ("vit-l32-jft", "ViT-L/32", JFT, 7, 6e-4, "linear", 0.1, 0.0, 518),
    ("vit-l16-jft", "ViT-L/16", JFT, 7, 4e-4, "linear", 0.1, 0.0, 518),
    ("vit-l16-jft-14ep", "ViT-L/16", JFT, 14, 4e-4, "linear", 0.1, 0.0, 1036),
    ("vit-h14-jft", "ViT-H/14", JFT, 14, 3e-4, "linear", 0.1, 0.0, 1036),
    ("bit-r50x1-jft", "BiT-R50x1", JFT, 7, 1e-3, "linear", 0.1, 0.0, 518),
    ("bit-r50x2-jft", "BiT-R50x2", JFT, 7, 1e-3, "linear", 0.1, 0.0, 518),
    ("bit-r101x1-jft", "BiT-R101x1", JFT, 7, 8e-4, "linear", 0.1, 0.0, 518),
    ("bit-r152x1-jft", "BiT-R152x1", JFT, 7, 6e-4, "linear", 0.1, 0.0, 518),
    ("bit-r152x2-jft", "BiT-R152x2", JFT, 7, 6e-4, "linear", 0.1, 0.0, 518),
    ("r50-vit-b16-jft", "R50+ViT-B/16", JFT, 7, 8e-4, "linear", 0.1, 0.0, 518),
    ("r50-vit-b32-jft", "R50+ViT-B/32", JFT, 7, 8e-4, "linear", 0.1, 0.0, 518),
    ("r50-vit-l32-jft", "R50+ViT-L/32", JFT, 7, 2e-4, "linear", 0.1, 0.0, 518),
    ("r50-vit-l16-jft", "R50+ViT-L/16", JFT, 7, 4e-4, "linear", 0.1, 0.0, 518),
    ("r50-vit-l16-jft-14ep", "R50+ViT-L/16", JFT, 14, 4e-4, "linear", 0.1, 0.0, 1036),
    ("vit-b16-imagenet21k", "ViT-B/16", I21K, 90, 1e-3, "linear", 0.03, 0.1, 312),
    ("vit-b32-imagenet21k", "ViT-B/32", I21K, 90, 1e-3, "linear", 0.03, 0.1, 312),
    ("vit-l16-imagenet21k", "ViT-L/16", I21K, 90, 1e-3, "linear", 0.03, 0.1, 312),
    ("vit-l16-imagenet21k-30ep", "ViT-L/16", I21K, 30, 1e-3, "linear", 0.03, 0.1, 104),
    ("vit-l32-imagenet21k", "ViT-L/32", I21K, 90, 1e-3, "linear", 0.03, 0.1, 312),
    ("vit-l32-imagenet21k-30ep", "ViT-L/32", I21K, 30, 1e-3, "linear", 0.03, 0.1, 104),
    ("vit-b16-imagenet", "ViT-B/16", IMAGENET, 300, 3e-3, "cosine", 0.3, 0.1, 94),
    ("vit-b32-imagenet", "ViT-B/32", IMAGENET, 300, 3e-3, "cosine", 0.3, 0.1, 94),
    ("vit-l16-imagenet", "ViT-L/16", IMAGENET, 300, 3e-3, "cosine", 0.3, 0.1, 94),
    ("vit-l32-imagenet", "ViT-L/32", IMAGENET, 300, 3e-3, "cosine", 0.3, 0.1, 94),
]
CLASSES = {JFT: 18_291, I21K: 21_843, IMAGENET: 1000}
# Loss, bias of a fresh head, last rate of the decay, clipping, source: what the code that was released has.
UNPRINTED = {
    JFT: ("sigmoid", -10.0, 0.0, 0.0, ""),
    I21K: ("sigmoid", -10.0, 1e-5, 0.0, "imagenet21k"),
    IMAGENET: ("softmax", 0.0, 0.0, 1.0, "imagenet"),
}


@pytest.mark.parametrize("row", TABLE3, ids=lambda row: row[0])
def test_row_of_table_3(row: tuple[str, str, int, int, float, str, float, float, int]) -> None:
    name, network, pictures, epochs, lr, decay, weight_decay, dropout, thousands = row
    run = load_recipe(name)
    assert (run.epochs, run.steps, run.batch) == (epochs, 0, 4096)
    assert round(run.epochs * pictures / run.batch / 1000) == thousands
    assert (run.optim.kind, run.optim.lr, run.optim.weight_decay) == ("adamw", lr, weight_decay)
    assert (run.optim.momentum, run.optim.second, run.optim.eps) == (0.9, 0.999, 1e-8)
    assert (run.schedule.decay, run.schedule.warmup) == (decay, 10_000)
    check_network(run, network, CLASSES[pictures], dropout)
    loss, bias, end, clip, source = UNPRINTED[pictures]
    assert (run.objective.loss, run.objective.head_bias, run.objective.smoothing) == (loss, bias, 0.0)
    assert (run.schedule.end, run.optim.clip, run.data.source) == (end, clip, source)


def check_network(run: Run, network: str, classes: int, dropout: float) -> None:
    """The network of the row, with the head of pre-training (3.1), on an Inception crop of 224 px and nothing else."""
    assert run.model is not None
    if isinstance(run.model, ViTConfig):
        assert run.model == model_config(network, classes=classes, head="tanh", dropout=dropout)
    else:
        assert isinstance(run.model, ResNetConfig)
        assert run.model == model_config(network, classes=classes)
    assert run.model.image == (224, 224)
    crop = run.augmentation.crop
    assert isinstance(crop, InceptionCrop)
    assert (crop.size, crop.area, run.augmentation.flip) == ((224, 224), (0.05, 1.0), 0.5)
    assert (crop.sampler, crop.aspect) == ("tensorflow", (0.75, 1.33))  # the released code's
    assert (run.augmentation.policy, run.augmentation.erase) == (None, None)
    assert (run.mix.mixup, run.mix.cutmix, run.average) == (0.0, 0.0, 0.0)


# recipe, source, steps, grid of learning rates, warm-up, part of train held out (4.1)
RATES = (0.001, 0.003, 0.01, 0.03)
TABLE4 = [
    ("finetune-imagenet", "imagenet", 20_000, (0.003, 0.01, 0.03, 0.06), 500, 0.01),
    ("finetune-cifar10", "cifar10", 10_000, RATES, 500, 0.02),
    ("finetune-cifar100", "cifar100", 10_000, RATES, 500, 0.02),
    ("finetune-pets", "pets", 500, RATES, 100, 0.10),
    ("finetune-flowers", "flowers102", 500, RATES, 100, 0.10),
    ("finetune-vtab", "", 2_500, (0.01,), 500, 0.0),
]


@pytest.mark.parametrize("row", TABLE4, ids=lambda row: row[0])
def test_row_of_table_4(row: tuple[str, str, int, tuple[float, ...], int, float]) -> None:
    name, source, steps, rates, warmup, dev = row
    run = load_recipe(name)
    assert (run.steps, run.epochs, run.batch) == (steps, 0, 512)
    assert find_sweep_grid(name) == {"optim.lr": rates}
    assert run.optim.lr in rates
    check_finetuning(run)
    assert (run.schedule.warmup, run.data.source, run.data.dev) == (warmup, source, dev)
    assert run.augmentation.size == (384, 384)
    assert run.average == 0.0


def check_finetuning(run: Run) -> None:
    """SGD with momentum 0.9, cosine decay to 0, clipping at 1, no weight decay, softmax; BiT's crop and flip."""
    assert (run.optim.kind, run.optim.momentum, run.optim.momentum_type) == ("sgd", 0.9, "bfloat16")
    assert (run.optim.weight_decay, run.optim.clip) == (0.0, 1.0)
    assert (run.schedule.decay, run.schedule.end) == ("cosine", 0.0)
    assert (run.objective.loss, run.objective.smoothing) == ("softmax", 0.0)
    assert run.model is None
    crop = run.augmentation.crop
    assert isinstance(crop, ResizeCrop)
    assert isinstance(crop.resize, tuple)
    assert crop.resize[0] / crop.size[0] == pytest.approx(448 / 384, abs=1e-3)
    assert run.augmentation.flip == 0.5


@pytest.mark.parametrize(("name", "size", "network"), [("512", 512, "ViT-L/16"), ("518", 518, "ViT-H/14")])
def test_table_2_is_finer_and_averaged(name: str, size: int, network: str) -> None:
    run = load_recipe(f"finetune-imagenet-{name}")
    assert run.augmentation.size == (size, size)
    assert run.average == 0.9999
    assert (run.steps, run.optim) == (20_000, load_recipe("finetune-imagenet").optim)
    check_finetuning(run)
    assert model_config(network, image_size=size).image == (size, size)  # the patch divides it


@pytest.mark.parametrize(
    ("task", "crops", "flips"),
    [
        ("caltech101", True, True),
        ("clevr-count", False, True),
        ("clevr-distance", False, True),
        ("dmlab", False, True),
        ("kitti-distance", False, True),
        ("dsprites-location", False, False),
        ("dsprites-orientation", True, False),
        ("smallnorb-azimuth", True, False),
        ("smallnorb-elevation", True, True),
    ],
)
def test_vtab_task_keeps_its_answer(task: str, crops: bool, flips: bool) -> None:
    """BiT's supplement F: no crop where it would cut the answer off, no flip where it would turn it."""
    run = with_data(load_recipe("finetune-vtab"), f"vtab/{task}")
    assert run.data.source == f"vtab/{task}"
    assert run.data.train == "trainval1000"
    assert isinstance(run.augmentation.crop, ResizeCrop) == crops
    assert (run.augmentation.flip > 0) == flips
    assert run.augmentation.size == (384, 384)


# source, crop, resize, steps, warm-up, supports of the rate, MixUp
HYPER_RULE = [
    ("imagenet", 384, 448, 20_000, 500, (6_000, 12_000, 18_000), 0.1),
    ("cifar10", 128, 160, 10_000, 500, (3_000, 6_000, 9_000), 0.1),
    ("cifar100", 128, 160, 10_000, 500, (3_000, 6_000, 9_000), 0.1),
    ("pets", 384, 448, 500, 100, (200, 300, 400), 0.0),
    ("flowers", 384, 448, 500, 100, (200, 300, 400), 0.0),
]


@pytest.mark.parametrize("row", HYPER_RULE, ids=lambda row: row[0])
def test_row_of_the_hyper_rule(row: tuple[str, int, int, int, int, tuple[int, ...], float]) -> None:
    """The released code's rate: linear to the first support, then a tenth behind each further one, not at it."""
    name, crop, resize, steps, warmup, supports, mixup = row
    run = load_recipe(f"bit-finetune-{name}")
    assert (run.augmentation.size, run.steps, run.batch) == ((crop, crop), steps, 512)
    assert isinstance(run.augmentation.crop, ResizeCrop)
    assert run.augmentation.crop.resize == (resize, resize)
    assert (run.optim.kind, run.optim.lr, run.optim.momentum, run.optim.weight_decay) == ("sgd", 0.003, 0.9, 0.0)
    for step in {0, 1, warmup - 1, warmup, steps - 1, *(at + by for at in supports for by in (-1, 0, 1))}:
        wanted = 0.003 * step / warmup if step < warmup else 0.003 / 10 ** sum(at < step for at in supports)
        rate = learning_rate(step, run.schedule, base=run.optim.lr, total=steps)
        assert rate == pytest.approx(wanted, rel=1e-12), step
    assert run.mix.mixup == mixup
    assert run.data.source == {"flowers": "flowers102"}.get(name, name)


@pytest.mark.parametrize(("epochs", "steps"), [(90, 111_477), (150, 185_794), (300, 371_588)])
def test_plain_vit_of_the_later_report(epochs: int, steps: int) -> None:
    """The values of its released configuration; the rate's decay of 1e-4 is 0.1 in ours, times the rate of 1e-3."""
    run = load_recipe(f"plain-vit-s16-{epochs}ep")
    assert (run.epochs, run.batch) == (epochs, 1024)
    assert round(run.epochs * (IMAGENET - round(IMAGENET * run.data.dev)) / run.batch) == steps
    assert isinstance(run.model, ViTConfig)
    assert (run.model.position, run.model.pool, run.model.class_token) == ("sincos2d", "mean", False)
    assert (run.model.head, run.model.dropout, run.model.width, run.model.depth) == ("tanh", 0.0, 384, 12)
    assert (run.optim.lr, run.optim.lr * run.optim.weight_decay, run.optim.clip) == (1e-3, 1e-4, 1.0)
    assert (run.optim.momentum, run.optim.second, run.optim.momentum_type) == (0.9, 0.999, "bfloat16")
    assert (run.schedule.decay, run.schedule.warmup) == ("cosine", 10_000)
    assert run.mix.mixup == 0.2
    policy = run.augmentation.policy
    assert isinstance(policy, RandAugment)
    assert policy.ops == 2
    levels = policy.choices((224, 224))
    assert (levels["rotate"], levels["shear_x"], levels["translate_x"]) == ((30, -30), (0.3, -0.3), (101, -101))


def test_both_tables_are_whole() -> None:
    """No row without a recipe, no recipe of the tables without a row."""
    rows = {row[0] for row in TABLE3}
    later = {name for name in list_recipes() if name.startswith("plain-vit-")}  # the authors' ImageNet-1k recipe
    assert rows | later == {name for name, entry in list_recipes().items() if entry.module == "table3"}
    finer = {"finetune-imagenet-512", "finetune-imagenet-518"}
    assert {row[0] for row in TABLE4} | finer == {
        name
        for name, entry in list_recipes().items()
        if entry.module == "table4" and not name.startswith("bit-")  # BiT's HyperRule
    }


# Table 6: ImageNet accuracy, exaFLOPs.
TABLE6 = [
    *(("vit-b32-jft", "80.73", "55"), ("vit-b16-jft", "84.15", "224"), ("vit-l32-jft", "84.37", "196")),
    *(("vit-l16-jft", "86.30", "783"), ("vit-l16-jft-14ep", "87.12", "1,567"), ("vit-h14-jft", "88.08", "4,262")),
    *(("bit-r50x1-jft", "77.54", "50"), ("bit-r50x2-jft", "82.12", "199"), ("bit-r101x1-jft", "80.67", "96")),
    *(("bit-r152x1-jft", "81.88", "141"), ("bit-r152x2-jft", "84.97", "563")),
    *(("r50-vit-b32-jft", "84.90", "106"), ("r50-vit-b16-jft", "85.58", "274"), ("r50-vit-l32-jft", "85.68", "246")),
    *(("r50-vit-l16-jft", "86.60", "859"), ("r50-vit-l16-jft-14ep", "87.12", "1,668")),
]


@pytest.mark.parametrize(("name", "accuracy", "cost"), TABLE6)
def test_docstring_has_the_number_of_table_6(name: str, accuracy: str, cost: str) -> None:
    assert f": {accuracy} on ImageNet, {cost} exaFLOPs" in list_recipes()[name].help
