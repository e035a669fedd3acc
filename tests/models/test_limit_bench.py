"""The scripts that show where the time of a step goes: operations are those of the network, and every kernel runs."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("timm", exc_type=ImportError)

from bench import limit
from tests.models.test_fused import run_interpreted
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import model_config

BATCH = 3


@pytest.mark.parametrize("name", ["vit_ti_16", "vit_b_16", "vit_h_14"])
def test_a_layer_more_costs_what_the_config_says(name: str) -> None:
    config = model_config(name)
    assert isinstance(config, ViTConfig)
    deeper = replace(config, depth=config.depth + 1)
    for training, times in ((False, 1), (True, 3)):
        flops = [
            sum(part[0] for part in limit.count_work(c, BATCH, 1, training=training).values()) for c in (config, deeper)
        ]
        assert flops[1] - flops[0] == times * 2 * BATCH * (deeper.macs - config.macs)


def test_the_last_layer_and_the_head_cost_less_than_the_whole() -> None:
    config = model_config("vit_b_16")
    assert isinstance(config, ViTConfig)
    work = limit.count_work(config, BATCH, 1, training=False)
    assert 0.92 < sum(part[0] for part in work.values()) / (2 * BATCH * config.macs) < 0.96


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopB_TNN", limit.PRODUCTS),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", limit.ATTENTION),
        ("_attention_backward_kernel", limit.ATTENTION),
        ("_gelu_backward_kernel", limit.GELU),
        ("_gelu_turned_kernel", limit.GELU),
        ("_round_turned_kernel", limit.QUANTISE),
        ("_sample_scale_kernel", limit.QUANTISE),
        ("_add_norm_backward_kernel", limit.NORMS),
        ("triton_per_fused_add_native_layer_norm_3", limit.NORMS),
        ("at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", limit.UPDATE),
        ("triton_poi_fused_clone_7", limit.OTHER),
    ],
)
def test_kernels_are_told_apart(kernel: str, kind: str) -> None:
    assert limit.name_kind(kernel) == kind


@pytest.mark.slow
def test_bench_runs_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "limit.json"
    size = ["--models", "Ti/16", "--image-size", "32", "--depth", "2", "--batch", "2", "--side", "64"]
    assert limit.main(["--device", "cpu", "--compile", "off", "--seconds", "0.01", "--out", str(out), *size]) == 0
    found = json.loads(out.read_text())
    assert {step["kind"] for step in found["steps"]} == {"training", "inference"}
    assert all(step["ms"] > 0 for step in found["steps"])
    assert all(share > 0 for row in found["products"]["Ti/16"] for share in row["share"].values())


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton here")
def test_every_kernel_runs(tmp_path: Path) -> None:
    out = tmp_path / "kernels.json"
    size = ["--models", "tiny", "--batch", "1", "--tokens", "5"]
    run_interpreted(f"from bench.kernels import main; main(['--device', 'cpu', '--out', {str(out)!r}, *{size}])")
    (rows,) = json.loads(out.read_text())["kernels"].values()
    assert all(row["ms"] > 0 for row in rows)
    assert len(rows) == 11
