"""What --dry-run and the planner say of products in few bits."""

from typing import Any

import pytest

from megatron_ext.cost.hardware import TABLE, Machine
from megatron_ext.cost.kernel_times import Kernels
from megatron_ext.cost.stage_parameters import Shapes
from megatron_ext.parts.protocol import Product
from megatron_ext.parts.stack import layers
from megatron_ext.plugins.low_precision.describe import FewBits
from tests.support.small_models import small_config

MODEL = {"hidden_size": 8192, "num_attention_heads": 64, "num_layers": 4, "seq_length": 4096, "ffn_hidden_size": 32768}
FP8 = {"fp8_format": "hybrid", "fp8_recipe": "rowwise"}
NVFP4 = {"fp4_format": "e2m1"}


def seconds(device: str, **training: Any) -> float:
    """Forward and backward seconds of the MLP of one layer."""
    config = small_config(MODEL, training={"bf16": True, **training})
    kernels = Kernels(config, Shapes(config), Machine(TABLE[device]), fsdp=False)
    return sum(kernels.layer(layers(config)[0])[2])


@pytest.mark.parametrize(
    ("device", "training", "gain"),
    [("h100", FP8, 2.0), ("b200", NVFP4, 4.0), ("gb300", NVFP4, 6.0), ("mi355x", FP8, 2.0), ("a100", FP8, 1.0)],
)
def test_large_products_take_as_much_less_time_as_the_peak_is_higher(
    device: str, training: dict[str, Any], gain: float
) -> None:
    """Less what rounding and reading the factors takes; a GPU without such products is not faster."""
    found = seconds(device) / seconds(device, **training)
    assert gain * 0.5 < found <= gain
    half = seconds(device, **training, first_last_layers_bf16=True)
    assert half == pytest.approx((seconds(device) + seconds(device, **training)) / 2)


def test_rates_are_at_least_those_of_sixteen_bits() -> None:
    for hardware in TABLE.values():
        assert 1.0 <= hardware.gain(8) <= 2.05, hardware.name
        assert 1.0 <= hardware.gain(4) <= 6.0, hardware.name
        assert hardware.gain(0) == hardware.gain(16) == 1.0
    assert {name for name, row in TABLE.items() if row.peak_4bit_tflops} == {"b200", "gb200", "b300", "gb300", "mi355x"}


def test_what_the_dry_run_says() -> None:
    formats = FewBits()
    assert formats.described(small_config()) == []
    assert formats.bits(small_config()) is None
    config = small_config(training={**NVFP4, "first_last_layers_bf16": True})
    assert formats.described(config) == [
        "products in FP4      --fp4-format e2m1, --fp4-recipe nvfp4, in 2 of 4 layers; estimates of memory are those "
        "without"
    ]
    assert formats.bits(config) == (0.5, (4, 4, 4))
    assert formats.bits(small_config(training=FP8)) == (1.0, (8, 8, 8))


def test_a_product_alone_is_in_the_precision_of_the_run() -> None:
    config = small_config(MODEL, training={"bf16": True, **FP8})
    plain = small_config(MODEL, training={"bf16": True})
    found = [Kernels(each, Shapes(each), Machine(TABLE["h100"]), fsdp=False) for each in (config, plain)]
    product = Product(4096, 8192, 8192)
    assert found[0].product(product) == found[1].product(product)
    assert found[0].output() == found[1].output(), "the output layer stays in bf16"
