"""What the core asks of products in few bits, without torch: flags, GPUs, --dry-run, the planner's rates."""

from random import Random
from typing import Any

from megatron_ext.config.schema import Config, flags_of
from megatron_ext.parts.parameter import Parameter
from megatron_ext.parts.protocol import GatheredBytes, ProductFormats, taken
from megatron_ext.parts.stack import layers
from megatron_ext.parts.ways import Way
from megatron_ext.plugins.low_precision.flags import LowPrecisionFlags
from megatron_ext.plugins.low_precision.formats import (
    asked,
    chosen_layers,
    gathers_in_eight_bits,
    gathers_whole,
    is_matrix,
    recipe_of,
    with_recipe,
)


class FewBits(ProductFormats):
    """Products in the formats that --fp8-format or --fp4-format chooses."""

    def asked(self, config: Config) -> str | None:
        """Return the flag that asks for few bits, with its value; None without."""
        return asked(config)

    def missing(self, config: Config, device: Any) -> str | None:
        """Return why a rank's device cannot multiply in the recipe, with one that it can."""
        flag, capability = asked(config), device.compute_capability()
        if flag is None or capability is None:
            return None
        from megatron_ext.plugins.low_precision.products import lacks

        lacking = lacks(recipe_of(config), capability, device.model_name)
        if lacking is None:
            return None
        other = "use --fp8-recipe rowwise, or " if "--fp8" in flag and capability >= (8, 9) else ""
        if "--fp4" in flag and capability >= (8, 9):
            other = "use --fp8-format hybrid instead, or "
        return f"{with_recipe(config)}: {lacking}; {other}leave {flag.split()[0]} out to train in bf16"

    def described(self, config: Config) -> list[str]:
        """Return the line of --dry-run about the formats and the layers that have them."""
        flag = asked(config)
        if flag is None:
            return []
        of = f"{len(chosen_layers(config))} of {len(layers(config))} layers"
        chosen = with_recipe(config).replace(" --", ", --")
        kind = "FP8" if "--fp8" in flag else "FP4"
        gathers = flags_of(config.training, LowPrecisionFlags).fp8_param_gather and gathers_whole(config) is None
        gathered = "; weights are gathered in FP8" if gathers else ""
        return [f"products in {kind}      {chosen}, in {of}{gathered}; estimates of memory are those without"]

    def bits(self, config: Config) -> tuple[float, tuple[int, int, int]] | None:
        """Return the share of the layers in few bits, and the bits of the factors of their three products."""
        if asked(config) is None:
            return None
        forward, input_gradient, weight_gradient = (
            max(pair.left.element.bits, pair.right.element.bits) for pair in recipe_of(config)
        )
        return len(chosen_layers(config)) / len(layers(config)), (forward, input_gradient, weight_gradient)

    def gathered_bytes(self, config: Config) -> GatheredBytes | None:
        """Return what says 1 of the weights that --fp8-param-gather gathers in FP8."""
        chosen = chosen_layers(config)
        if not chosen or not flags_of(config.training, LowPrecisionFlags).fp8_param_gather:
            return None

        def of(parameter: Parameter, layer: int | None, shape: tuple[int, ...]) -> int | None:
            is_chosen = (layer is None or layer in chosen) and is_matrix(parameter.name, shape)
            return 1 if is_chosen and gathers_in_eight_bits(config, shape) else None

        return of

    def install(self, chunk: Any, config: Config, groups: Any) -> None:
        """Have the chosen layers of a model chunk multiply in few bits."""
        if asked(config) is not None:
            from megatron_ext.plugins.low_precision.install import install

            install(chunk, config, groups)


PRODUCT_FORMATS = (FewBits(),)


def _way(flag: str, field: str, name: str) -> Way:
    return Way(
        lambda config: getattr(config.training, field) is not None,
        f"{flag} {{0.{field}}} multiplies in {name}",
        {},
        f"leave {flag} out to train them in bf16",
        like="FP8",
    )


WAYS = ({"FP8": _way("--fp8-format", "fp8_format", "FP8"), "FP4": _way("--fp4-format", "fp4_format", "FP4")},)


def draw(random: Random) -> list[str]:
    """Return flags of a format of eight or four bits, drawn at random; most draws have none."""
    of_fp8 = f"--fp8-format {random.choice(('hybrid', 'e4m3'))} --fp8-recipe "
    # Not blockwise: its sides of 128 are longer than those of the models that are drawn.
    recipes = [f"{of_fp8}{recipe}" for recipe in ("tensorwise", "rowwise", "mxfp8")]
    recipes += [f"--fp4-format e2m1 --fp4-recipe {recipe}" for recipe in ("nvfp4", "mxfp4")]
    ends = "--first-last-layers-bf16 --num-layers-at-start-in-bf16"
    kept = ("", "", f" {ends} 1 --num-layers-at-end-in-bf16 0", f" {ends} 0 --num-layers-at-end-in-bf16 1")
    gathers = random.choice(("", " --fp8-param-gather"))
    return taken(random, (0.04, f"--bf16 {random.choice(recipes)}{random.choice(kept)}{gathers}"))


DRAWS = (draw,)
