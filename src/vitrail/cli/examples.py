"""Lines to type, for the end of each command's help. A test parses every one of them."""

from typing import Final

EXAMPLES: Final = {
    "demo": ("demo", "demo --out runs/again --seed 1"),
    "doctor": ("doctor", "doctor --json > doctor.json"),
    "predict": (
        "predict cat.jpg",
        "predict runs/flowers photos --topk 3 --csv > answers.csv",
        "predict cat.jpg --attention looked",
        "predict runs/shapes photos --out masks",
    ),
    "fit": (
        "fit vitrail-cifar10 photos --out photos.safetensors",
        "fit WEIGHTS photos --shots 10 --out ten.safetensors",
    ),
    "embed": (
        "embed vitrail-cifar10 photos --out photos.parquet",
        "embed WEIGHTS cifar10@test --out features.npz --type float16",
    ),
    "inspect": (
        "inspect vitrail-cifar10 cat.jpg dog.jpg --out look",
        "inspect runs/flowers flowers --only rollout,distance",
    ),
    "finetune": (
        "finetune vitrail-cifar10 photos --out runs/photos",
        "finetune WEIGHTS photos --epochs 10 --lr 0.003 --image-size 384",
        "finetune --resume runs/photos",
    ),
    "pretrain": (
        "pretrain digits --out runs/first",
        "pretrain vit-b16-imagenet21k DATA --batch 1024 --dry-run",
        "pretrain --resume runs/first",
    ),
    "recipes": ("recipes", "recipes vit-l16-jft --set optim.lr=3e-4"),
    "report": ("report runs/first",),
    "replay": ("replay runs/first --step 120",),
    "evaluate": (
        "evaluate vitrail-cifar10 cifar10 --download",
        "evaluate runs/photos photos@test --page score.html --out results/photos.json",
    ),
    "fewshot": ("fewshot WEIGHTS photos --shots 1 5 10 25",),
    "probe": ("probe WEIGHTS photos --test others --out results/probe.json",),
    "knn": ("knn WEIGHTS photos -k 10 20",),
    "vtab": ("vtab WEIGHTS --root sets --dry-run", "vtab WEIGHTS --root sets --tasks cifar100 pets"),
    "study": (
        "study --list",
        "study positions",
        "study data-size --scale small --list",
        "study data-size cifar10 --scale small",
    ),
    "compare": ("compare results", "compare results --measures top-1 loss --out table.md"),
    "models": ("models", "models 'r50*'"),
    "trace": ("trace ViT-L/32 --image-size 256",),
    "cost": ("cost ViT-L/16 BiT-R50x1", "cost runs/photos --measure"),
    "data": ("data", "data photos --check", "data cifar10@test --download --sheet cifar10.png"),
    "data pack": ("data pack photos --out packed --shard-size 256MB --max-side 512",),
    "data dedup": ("data dedup photos --against photos@test cifar10@test --out copies",),
    "serve": ("serve", "serve runs/photos --port 8080"),
    "export": (
        "export runs/photos --to onnx --out photos.onnx",
        "export runs/photos photos --to onnx --int8",
        "export runs/photos --to hf --out photos-hf",
    ),
    "convert": (
        "convert google.npz --out mine.safetensors",
        "convert mine.safetensors --out theirs.pth --to torchvision",
    ),
    "completion": (
        "completion bash > ~/.local/share/bash-completion/completions/vitrail",
        "completion zsh > ~/.zfunc/_vitrail",
        "completion fish > ~/.config/fish/completions/vitrail.fish",
    ),
}
