"""Linear layers and experts whose products are computed in eight and four bits."""

from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "low_precision",
    page="docs/fp8.md",
    brings={
        "callbacks": "megatron_ext.plugins.low_precision.install:CALLBACKS",
        "draws": "megatron_ext.plugins.low_precision.describe:DRAWS",
        "flags": "megatron_ext.plugins.low_precision.flags:FLAGS",
        "product_formats": "megatron_ext.plugins.low_precision.describe:PRODUCT_FORMATS",
        "rules": "megatron_ext.plugins.low_precision.rules:RULES",
        "warnings": "megatron_ext.plugins.low_precision.rules:WARNINGS",
        "ways": "megatron_ext.plugins.low_precision.describe:WAYS",
    },
)
