"""The traits of the optimizers of this plugin: what each keeps, reads and runs in."""

from dataclasses import replace

from megatron_ext.config.derived.optimizer_traits import (
    ALL_SCHEMES,
    AVERAGE,
    MUON,
    Elsewhere,
    OptimizerTraits,
    State,
)

LION = OptimizerTraits(
    name="lion",
    title="Lion",
    torch_class="megatron_ext.plugins.optimizers.lion:Lion",
    arguments={"betas": ("lion_beta1", "lion_beta2")},
    states=(State("exp_avg"),),
    schemes=ALL_SCHEMES,
    can_be_masked=True,
    drawn=("--lion-beta1 0.8 --lion-beta2 0.9",),
    built_as="adam",  # the engine's own Lion is in another package, and its distributed optimizer refuses SGD
    elsewhere={"deepspeed": Elsewhere(("lion",), flags="--lion-beta1 0.9 --lion-beta2 0.999")},
)

ADAPTIVE_MUON = replace(
    MUON,
    name="adaptive_muon",
    title="AdaptiveMuon",
    torch_class="megatron_ext.plugins.optimizers.adaptive_muon:AdaptiveMuon",
    arguments={**MUON.arguments, **{name: f"adaptive_muon_{name}" for name in ("moment2_method", "beta2", "eps")}},
    states=(*MUON.states, State("moment2_buffer")),
    drawn=(
        *MUON.drawn,
        *(f"--adaptive-muon-moment2-method {method}" for method in ("normuon", "namo")),
        "--adaptive-muon-beta2 0.8 --adaptive-muon-eps 1e-6",
    ),
    remark="Muon whose updates are divided by the root of their second moment",
    elsewhere={},
)

ADAFACTOR = replace(
    MUON,
    name="adafactor",
    title="Adafactor",
    torch_class="megatron_ext.plugins.optimizers.adafactor:Adafactor",
    arguments={name: f"adafactor_{name}" for name in ("beta2_decay", "eps2", "clip")},
    states=(State("row_var", along=-1), State("col_var", along=-2)),
    counts_updates=True,
    drawn=("--adafactor-beta2-decay -0.5", "--adafactor-eps2 0.01", "--adafactor-clip 2"),
    remark="matrices of layers by Adafactor, which keeps means of rows and columns; the rest by AdamW",
    elsewhere={},
)

ADEMAMIX = OptimizerTraits(
    name="ademamix",
    title="AdEMAMix",
    torch_class="megatron_ext.plugins.optimizers.ademamix:AdEMAMix",
    arguments={
        "betas": ("adam_beta1", "adam_beta2", "ademamix_beta3"),
        "alpha": "ademamix_alpha",
        "warmup": "ademamix_warmup",
        "eps": "adam_eps",
    },
    states=(State("exp_avg"), State("exp_avg_slow"), State("exp_avg_sq")),
    schemes=ALL_SCHEMES,
    built_as="adam",
    counts_updates=True,
    drawn=(
        "--ademamix-beta3 0.99 --ademamix-alpha 2",
        "--ademamix-warmup 3",
        "--adam-beta1 0.8 --adam-beta2 0.95 --adam-eps 1e-6",
    ),
    elsewhere={"axolotl": Elsewhere(("ademamix",))},
)

SCHEDULE_FREE = OptimizerTraits(
    name="schedule_free",
    title="schedule-free AdamW",
    torch_class="megatron_ext.plugins.optimizers.schedule_free:ScheduleFree",
    arguments={"betas": ("adam_beta1", "adam_beta2"), "eps": "adam_eps"},
    states=(State("z", begins_as_weight=True), State(AVERAGE, begins_as_weight=True), State("exp_avg_sq")),
    schemes=ALL_SCHEMES,
    built_as="adam",
    counts_updates=True,
    numbers=("largest_rate", "summed_squares"),
    drawn=("--adam-beta1 0.8 --adam-beta2 0.95 --adam-eps 1e-6",),
    remark="AdamW whose weights are evaluated as an average, with a rate that does not decay",
    elsewhere={"axolotl": Elsewhere(("schedule_free_adamw",))},
)

OPTIMIZERS = (LION, ADAPTIVE_MUON, ADAFACTOR, ADEMAMIX, SCHEDULE_FREE)
