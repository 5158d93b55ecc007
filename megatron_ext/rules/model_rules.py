"""Rules about the model's shape."""

from collections.abc import Iterator

from megatron_ext.config.derived.layer_patterns import (
    DEPTH,
    EXPERTS,
    MLP,
    PIPE,
    read_window,
)
from megatron_ext.config.parse.options import flag_of
from megatron_ext.config.resolve import Facts, positive
from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.parts.kinds import attention_is_replaced
from megatron_ext.parts.kinds import letters as known_letters
from megatron_ext.parts.stack import stack
from megatron_ext.rules.reads import reads
from megatron_ext.rules.suggest import (
    divisors,
    groups_fit,
    listed,
    nearest_multiples,
    tensor_sizes,
    unreadable_pattern,
    use,
    wrong_factors,
)


@reads()
def heads_divide_by_tensor_size(config: Config, facts: Facts) -> Iterator[str]:
    """Require that the attention heads divide by the tensor-parallel size."""
    heads, size = config.model.num_attention_heads, config.layout.tensor_model_parallel_size
    if positive(heads, size) and heads % size:
        fix = use("--tensor-model-parallel-size", tensor_sizes(config))
        fix = fix or f"use --num-attention-heads {listed(nearest_multiples(heads, size))}"
        yield f"--num-attention-heads {heads} is not divisible by --tensor-model-parallel-size {size}; {fix}"


@reads()
def query_groups_fit_tensor_size(config: Config, facts: Facts) -> Iterator[str]:
    """Require that the query groups are a multiple or a divisor of the tensor-parallel size."""
    model, size = config.model, config.layout.tensor_model_parallel_size
    heads = model.num_attention_heads
    for flag, groups in model.key_value_heads.items():
        if positive(heads, groups, size) and heads % size == 0 and not groups_fit(groups, size):
            working = [g for g in divisors(heads) if groups_fit(g, size)]
            yield (
                f"{flag} {groups} is neither a multiple nor a divisor of --tensor-model-parallel-size {size}; "
                f"use {flag} {listed(working)}"
            )


def heads_divide_by_query_groups(config: Config, facts: Facts) -> Iterator[str]:
    """Require that the attention heads divide by the query groups."""
    model = config.model
    heads, groups = model.num_attention_heads, model.num_query_groups
    if not positive(heads, groups):
        return
    for flag, number in model.key_value_heads.items():
        if positive(number) and heads % number:
            yield (
                f"--num-attention-heads {heads} is not divisible by {flag} {number}; use {flag} "
                f"{listed(divisors(heads))}"
            )
    if not model.group_query_attention and groups != heads:
        yield f"--num-query-groups {groups} has no effect without --group-query-attention; give both or neither"


def head_size_is_whole(config: Config, facts: Facts) -> Iterator[str]:
    """Require a head size: --kv-channels, or a hidden size that divides by the heads."""
    model = config.model
    hidden, heads = model.hidden_size, model.num_attention_heads
    if positive(hidden, heads) and model.kv_channels is None and not attention_is_replaced(model):
        working = nearest_multiples(hidden, heads)
        yield (
            f"--hidden-size {hidden} is not divisible by --num-attention-heads {heads}; use --hidden-size "
            f"{listed(working)}, or give the size of one head: --kv-channels {max(hidden // heads // 2 * 2, 2)}"
        )


def rotary_channels_are_even(config: Config, facts: Facts) -> Iterator[str]:
    """Require an even number of rotated channels."""
    model = config.model
    of_heads = model.position_embedding_type == "rope" and not attention_is_replaced(model)
    if not of_heads or not positive(model.kv_channels):
        return
    if not 0 < model.rotary_percent <= 1:
        yield f"--rotary-percent {model.rotary_percent:g} is not above 0 and at most 1; use --rotary-percent 1"
    elif int(model.kv_channels * model.rotary_percent) % 2 or int(model.kv_channels * model.rotary_percent) == 0:
        rotated = int(model.kv_channels * model.rotary_percent)
        fix = "--kv-channels " + str(model.kv_channels + 1) if model.rotary_percent == 1 else "--rotary-percent 1"
        yield (
            f"--kv-channels {model.kv_channels} with --rotary-percent {model.rotary_percent:g} rotates {rotated} "
            f"channels of each head, but they turn in pairs; use {fix}"
        )


@reads()
def mlp_divides_by_tensor_size(config: Config, facts: Facts) -> Iterator[str]:
    """Require that the MLP's width divides by the tensor-parallel size."""
    width, size = config.model.ffn_hidden_size, config.layout.tensor_model_parallel_size
    if positive(width, size) and width % size:
        yield (
            f"--ffn-hidden-size {width} is not divisible by --tensor-model-parallel-size {size}; "
            f"use --ffn-hidden-size {listed(nearest_multiples(width, size))}"
        )


def one_activation(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse two activations at once."""
    model = config.model
    switches = [
        ("--swiglu", model.swiglu),
        ("--relu", model.relu),
        ("--squared-relu", model.squared_relu),
        ("--geglu", model.geglu),
        ("--openai-gelu", model.openai_gelu and not model.geglu),
        ("--quick-geglu", model.quick_geglu),
        ("--xielu", model.xielu),
    ]
    flags = [flag for flag, on in switches if on]
    if len(flags) > 1:
        yield f"{' and '.join(flags)} name different activations; keep one of them"
    for flag, of_gates in (
        ("--activation-func-clamp-value", model.activation_func_clamp_value is not None),
        ("--glu-linear-offset", model.glu_linear_offset != 0.0),
    ):
        if of_gates and not model.gated_linear_unit:
            yield f"{flag} is of an MLP with a gate, which this one does not have; add --quick-geglu, or leave it out"


def branches_are_multiplied_as_they_are(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse a factor of branches whose norm would take it out again."""
    model = config.model
    if model.residual_multiplier != 1.0 and model.norm_position != "before":
        yield (
            f"--residual-multiplier {model.residual_multiplier:g} multiplies what --norm-position "
            f"{model.norm_position} normalizes afterwards; use --residual-multiplier 1"
        )


def multipliers_are_those_of_mup(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse two values for one multiplier."""
    model = config.model
    for flag, given, name in (
        ("--mup-embedding-mult", model.mup_embedding_mult, "embedding_multiplier"),
        ("--mup-output-mult", model.mup_output_mult, "logits_multiplier"),
    ):
        if given not in (1.0, value := getattr(model, name)):
            yield f"{flag} {given:g} and {flag_of(name)} {value:g} are the same factor; keep one of them"


def positions_cover_the_sequence(config: Config, facts: Facts) -> Iterator[str]:
    """Require learned positions for the whole sequence."""
    model = config.model
    rows, length = model.max_position_embeddings, model.seq_length
    if model.position_embedding_type == "learned_absolute" and positive(rows, length) and rows < length:
        yield (
            f"--max-position-embeddings {rows} is below --seq-length {length}, so that the last tokens have no "
            f"position; use --max-position-embeddings {length}"
        )


def sequences_are_one_chunk(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse sequences of more than one chunk of attention."""
    chunk, length = config.model.attention_chunk_size, config.model.seq_length
    if positive(chunk, length) and length > (chunk or length):
        yield (
            f"--attention-chunk-size {chunk} is below --seq-length {length}, and attention within chunks is not "
            f"computed here; use --seq-length {chunk}"
        )


def windows_are_well_formed(config: Config, facts: Facts) -> Iterator[str]:
    """Require a window, and a pattern of the layers that have it, which can be read."""
    model = config.model
    size, pattern = model.window_size, model.window_attn_skip_freq
    if pattern is not None and size is None:
        yield f"--window-attn-skip-freq {pattern} without --window-size says where nothing is; add --window-size 4095,0"
    try:
        if size is not None:
            read_window(size)
    except ValueError:
        yield (
            f"--window-size {size} is no pair of the positions before a query, at least 0 (or -1: all), and of those "
            "after it, 0 in a causal model; use --window-size 4095,0"
        )
    yield from unreadable_pattern("--window-attn-skip-freq", pattern, model.num_layers, f"2, or [1]*{model.num_layers}")


def layers_without_rotation_are_named(config: Config, facts: Facts) -> Iterator[str]:
    """Require a pattern which can be read, of layers that would be rotated otherwise."""
    model, pattern = config.model, config.model.no_rope_freq
    if pattern is None:
        return
    fix = f"4, or [0]*{model.num_layers}"
    yield from unreadable_pattern("--no-rope-freq", pattern, model.num_layers, fix, "the last")
    if model.position_embedding_type != "rope":
        yield (
            f"--no-rope-freq {pattern} says which layers rotate nothing, but with --position-embedding-type "
            f"{model.position_embedding_type} none does; use --position-embedding-type rope, or leave it out"
        )
    if model.transformer_impl != "local":
        yield (
            f"--no-rope-freq {pattern} needs layers of this program's own, but --transformer-impl is "
            f"{model.transformer_impl}; use --transformer-impl local"
        )


def layers_have_letters(config: Config, facts: Facts) -> Iterator[str]:
    """Require a pattern of known letters, as many as layers, and no other flag that sets the kind of a layer."""
    model, letters = config.model, config.model.hybrid_layer_pattern
    if letters is None:
        return
    letters_known = known_letters() + PIPE
    flag, known = (
        f"--hybrid-layer-pattern {letters}",
        f"{', '.join(known_letters()[:-1])} and {known_letters()[-1]}, and | between chunks of the pipeline",
    )
    main, *depths = letters.split(DEPTH)
    working = "".join(letter if letter in letters_known else MLP for letter in main) or "M-*-"
    if depths:
        of_depth = model.mtp_hybrid_override_pattern or depths[0]
        kept = "".join(letter for letter in of_depth if letter in working) or working[-1]
        working += f"{DEPTH}{kept}" * (model.mtp_num_layers or len(depths))
    reasons = {
        "D": "of attention with an indexer of keys, which a model of letters does not have here",
        DEPTH: f"before {_unlike(model, depths)}",
    }
    if letters != working:
        wrong = next((letter for letter in letters if letter not in letters_known), "")
        words = f"{wrong!r} is {reasons.get(wrong, 'no letter')}" if wrong else "there is no letter"
        own = "; a plugin brings others (docs/own_mixer.md)" if wrong and wrong not in reasons else ""
        yield f"{flag}: {words}; known are {known}{own}; use --hybrid-layer-pattern '{working}'"
        return
    if positive(model.num_layers) and model.num_layers != len(letters):
        yield (
            f"{flag} has {len(letters)} letters, but --num-layers is {model.num_layers}; use --num-layers "
            f"{len(letters)}, or leave it out"
        )
    if (EXPERTS in letters) != (model.num_experts is not None):
        before, _, after = letters.rpartition(MLP if MLP in letters else letters[-1])
        other = letters.replace(EXPERTS, MLP) if model.num_experts is None else before + EXPERTS + after
        what = "without --num-experts" if model.num_experts is None else f"and --num-experts {model.num_experts}"
        says = "names layers of experts" if model.num_experts is None else "names no layer of experts, E"
        yield f"{flag} {says}, {what}; use --hybrid-layer-pattern '{other}'"
    usual = {"experimental_attention_variant": None, "moe_layer_freq": None}
    usual |= {"parallel_residual": "none", "mup_base_num_layers": None}
    if model.mtp_hybrid_override_pattern is None:
        usual["mtp_num_layers"] = None
    for name in (name for name, value in usual.items() if getattr(model, name) != value):
        said = f"{flag_of(name)} is {getattr(model, name)}"
        yield f"{flag} says what each layer is, but {said}; leave {flag_of(name)} out"


def _unlike(model: ModelConfig, depths: list[str]) -> str:
    """Return what keeps the depths at the end of a pattern from being those of the model."""
    if len(set(depths)) > 1:
        return "depths of multi-token prediction whose letters differ, while each depth has the same"
    if model.mtp_num_layers is not None and model.mtp_num_layers != len(depths):
        return f"{len(depths)} depths of multi-token prediction, but --mtp-num-layers is {model.mtp_num_layers}"
    return f"other letters than --mtp-hybrid-override-pattern {model.mtp_hybrid_override_pattern}"


def depths_have_letters(config: Config, facts: Facts) -> Iterator[str]:
    """Require of the letters of a depth of multi-token prediction that layers of the model have them, too: flags of a
    kind of layer are read where the model has such layers."""
    model, letters = config.model, config.model.hybrid_layer_pattern
    of_depth = model.mtp_hybrid_override_pattern
    if of_depth is None:
        return
    flag = f"--mtp-hybrid-override-pattern {of_depth}"
    if letters is None:
        yield f"{flag} needs --hybrid-layer-pattern, the letters of the layers before the depths; leave it out"
    elif not of_depth or set(of_depth) - set(letters):
        wrong = next((letter for letter in of_depth if letter not in letters), "")
        words = f"no layer of --hybrid-layer-pattern {letters} is {wrong!r}" if wrong else "there is no letter"
        working = "".join(letter for letter in of_depth if letter in letters) or letters[-1]
        yield f"{flag}: {words}; use --mtp-hybrid-override-pattern '{working}'"


def every_multiplier_is_given(config: Config, facts: Facts) -> Iterator[str]:
    """Require as many factors of an MLP as there is to multiply, above 0, and that there is such an MLP."""
    model, letters = config.model, config.model.hybrid_layer_pattern or ""
    has_mlp = model.num_experts is None and MLP in (letters or MLP)
    mlp = model.swiglu and model.transformer_impl == "local" and has_mlp
    of = "--swiglu and --transformer-impl local, no --num-experts, and - in a pattern"
    yield from wrong_factors("mlp_multipliers", model.mlp_multipliers, 2, mlp, of)


def rope_scaling_has_a_range(config: Config, facts: Facts) -> Iterator[str]:
    """Require factors of rotary scaling that are in order."""
    model = config.model
    if model.use_rope_scaling and model.rope_scaling_low_freq_factor > model.rope_scaling_high_freq_factor:
        yield (
            f"--rope-scaling-low-freq-factor {model.rope_scaling_low_freq_factor:g} is above "
            f"--rope-scaling-high-freq-factor {model.rope_scaling_high_freq_factor:g}; use "
            "--rope-scaling-low-freq-factor 1 --rope-scaling-high-freq-factor 4"
        )
    if model.rope_type == "yarn" and model.beta_fast < model.beta_slow:
        yield (
            f"--beta-fast {model.beta_fast:g} is below --beta-slow {model.beta_slow:g}; use --beta-fast 32 "
            "--beta-slow 1"
        )
    if model.rope_type == "yarn" and model.rotary_base <= 1:
        yield (
            f"--rope-type yarn needs wavelengths that grow, but --rotary-base is {model.rotary_base:g}; use "
            "--rotary-base 10000"
        )


@reads("recomputation", "micro batch")
def longrope_has_a_factor_for_each_pair(config: Config, facts: Facts) -> Iterator[str]:
    """Require both lists of factors of --rope-type longrope, and of the right length."""
    model = config.model
    if model.rope_type != "longrope" or not positive(model.num_layers, model.kv_channels):
        return
    rotated = (kind.attention for kind, _ in stack(config).kinds if kind.rotary_table is not None)
    found = (one.rotary.channels(one.rotary_size) // 2 for one in rotated if one.rotary is not None)
    pairs = next(found, int(model.kv_channels * model.rotary_percent) // 2)
    for name in ("short", "long"):
        factors: tuple[float, ...] | None = getattr(model, f"longrope_{name}_factor")
        if factors is None or len(factors) != pairs or min(factors) <= 0:
            given = "missing" if factors is None else f"{len(factors)} numbers, the least of them {min(factors):g}"
            yield (
                f"--longrope-{name}-factor is {given}, but --rope-type longrope divides the frequency of each of "
                f"{pairs} pairs of channels; give it {pairs} numbers above 0, or use --rope-type rope"
            )


def positions_by_layer_have_layers(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse flags of layers with a window, or of layers without rotary embedding, if there are no such layers."""
    model = config.model
    if model.rotary_base_local is not None and (model.position_embedding_type != "rope" or model.window_size is None):
        yield (
            f"--rotary-base-local {model.rotary_base_local:g} is of layers with a window that rotate, but there are "
            "none; add --window-size 4095,0 --position-embedding-type rope, or leave it out"
        )
    of_windows = {
        "--num-query-groups-local": model.num_query_groups_local,
        "--softmax-type-local": model.softmax_type_local,
    }
    for flag, value in of_windows.items():
        if value is not None and model.window_size is None:
            yield f"{flag} {value} is of layers with a window; add --window-size 4095,0, or leave it out"
    fixed = model.attention_temperature_of == "fixed"
    if model.attention_temperature_scale is not None and model.no_rope_freq is None and fixed:
        rotating = "" if model.position_embedding_type == "rope" else " --position-embedding-type rope"
        yield (
            f"--attention-temperature-scale {model.attention_temperature_scale:g} is of layers that rotate nothing, "
            f"but there are none; add --no-rope-freq 4{rotating}, or leave it out"
        )


def no_position_embedding_has_rope(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse --no-position-embedding without rotary positions."""
    is_yarn = config.model.rope_type == "yarn" and not attention_is_replaced(config.model)
    kind = "yarn" if is_yarn else config.model.position_embedding_type
    if config.model.no_position_embedding and kind != "rope":
        yield (
            f"--no-position-embedding with --position-embedding-type {kind} is refused, as by Megatron, which takes it "
            "with rope alone; for rotary positions use --position-embedding-type rope, to train without any leave it "
            "out and use --position-embedding-type none"
        )


@reads()
def vocabulary_fits_its_padding(config: Config, facts: Facts) -> Iterator[str]:
    """Require a padded vocabulary that holds the true one and divides by the tensor-parallel size."""
    model, size = config.model, config.layout.tensor_model_parallel_size
    vocabulary = config.data.vocab_size or 0
    if not positive(vocabulary, model.padded_vocab_size, size):
        return
    if model.padded_vocab_size < vocabulary or model.padded_vocab_size % size:
        yield (
            f"--padded-vocab-size {model.padded_vocab_size} must be at least the vocabulary's {vocabulary} "
            f"entries and divisible by --tensor-model-parallel-size {size}; leave it out to have it derived"
        )


def transformer_engine_is_installed(config: Config, facts: Facts) -> Iterator[str]:
    """Require the package that --transformer-impl transformer_engine needs."""
    if config.model.transformer_impl == "transformer_engine" and "transformer_engine" not in facts.packages:
        yield (
            "--transformer-impl transformer_engine: the package transformer_engine is not installed; "
            "use --transformer-impl local, which needs no build"
        )


def external_kernels_are_installed(config: Config, facts: Facts) -> Iterator[str]:
    """Require the package of --external-kernels."""
    package = config.model.external_kernels
    if package != "none" and package not in facts.packages:
        yield (
            f"--external-kernels {package}: the package {package} is not installed; leave the flag out, the kernels of "
            "torch need no build"
        )


RULES = (
    heads_divide_by_tensor_size,
    query_groups_fit_tensor_size,
    heads_divide_by_query_groups,
    head_size_is_whole,
    rotary_channels_are_even,
    mlp_divides_by_tensor_size,
    one_activation,
    branches_are_multiplied_as_they_are,
    multipliers_are_those_of_mup,
    positions_cover_the_sequence,
    sequences_are_one_chunk,
    windows_are_well_formed,
    layers_without_rotation_are_named,
    layers_have_letters,
    depths_have_letters,
    every_multiplier_is_given,
    rope_scaling_has_a_range,
    longrope_has_a_factor_for_each_pair,
    positions_by_layer_have_layers,
    no_position_embedding_has_rope,
    vocabulary_fits_its_padding,
    transformer_engine_is_installed,
    external_kernels_are_installed,
)
