"""Draws models and layouts at random for the comparison of any layout with one process (`trials.py`).

    drawn = draw(Draws(seed=7), number=12)
    drawn.model                     # ("--num-layers 4", "--position-embedding-type rope", ...)
    drawn.first, drawn.second       # layouts: the run begins in one, and is resumed in the other

A draw is a function of the seed and its number. Kinds of parts draw themselves: `draw` of the describe.py of each kind
of the core, and the functions that plugins add to the extension point `draws`. Optimizers come from the registry.
Whether a draw can work is decided by the program itself, `configure`, as before a launch; a refused draw is counted by
its reason, and another is drawn in its place.
"""

import itertools
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from megatron_ext.config.derived.optimizers import OPTIMIZERS
from megatron_ext.config.derived.sharding import SCHEMES
from megatron_ext.config.parse.options import flag_of, options
from megatron_ext.config.schema import Config
from megatron_ext.config.schema.layout_flags import SCHEDULES
from megatron_ext.errors import ConfigurationError
from megatron_ext.parts.attention.describe import draw as draw_attention
from megatron_ext.parts.experts.describe import draw as draw_experts
from megatron_ext.parts.mlp.describe import draw as draw_mlp
from megatron_ext.parts.norm.describe import draw as draw_norm
from megatron_ext.parts.protocol import taken
from megatron_ext.parts.stack import layers
from megatron_ext.plugins.families.registry import written_as
from megatron_ext.plugins.prove.family_draws import bent
from megatron_ext.registry import brought
from megatron_ext.train.configure import configure

LAYOUTS_OF_A_MODEL = 4
"""Draws in a row that have the same model, whose one process is then trained once."""

_TRIES = 1000
"""Draws of one model, or of one layout, until one can work."""

_TIMES_MENDED = 3
"""Times that a refused draw is changed as the refusal says, before another is drawn."""

_TRIES_OF_KINDS = 10
"""Draws of the other flags next to the same kinds of parts, until other kinds are drawn."""

_OF_FAMILIES = 2
"""Of so many models one is given the shape of a family of Hugging Face near it, so that it is exported."""

_TRIES_OF_FAMILIES = 4
"""Families that a model is given the shape of, until one has all of it."""


@dataclass(frozen=True)
class Layout:
    """Flags of a layout, in pieces that only make sense together, on so many ranks."""

    ranks: int
    pieces: tuple[str, ...]

    @property
    def flags(self) -> list[str]:
        """The flags as words."""
        return words(self.pieces)


ONE_PROCESS = Layout(1, ())


@dataclass(frozen=True)
class Draw:
    """A model with its data, optimizer and precision, and the layouts that train it."""

    model: tuple[str, ...]
    """Flags in pieces."""

    first: Layout
    second: Layout
    """The layout in which the run is resumed in the middle."""

    kill: float | None = None
    """Moment at which a rank is killed, as a share of the steps; None: nobody is. The run is then resumed in the first
    layout, and must be equal bit for bit with one that nobody has killed."""

    @property
    def flags(self) -> list[str]:
        """The flags of the model as words."""
        return words(self.model)


def words(pieces: Sequence[str]) -> list[str]:
    """Return the words of pieces of flags."""
    return [word for piece in pieces for word in shlex.split(piece)]


@dataclass
class Draws:
    """Draws of one seed, and the reasons for which others were refused.

    Args:
        seed: seed of all draws.
        data: flags of the data.
        ranks: numbers of ranks to draw from.
    """

    seed: int
    data: Sequence[str]
    ranks: Sequence[int] = (2, 4)
    refused: Counter[str] = field(default_factory=Counter)
    """How many draws each reason has refused; numbers in it are written as N."""

    def model_of(self, number: int) -> tuple[tuple[str, ...], Config]:
        """Return the pieces of the model of draw `number`, and their configuration in one process."""
        random = Random(f"{self.seed} model {number // LAYOUTS_OF_A_MODEL}")
        tries, kinds = itertools.count(), list[str]()

        def drawn() -> tuple[str, ...]:
            # Kinds that refuse much would hardly ever be tried, were they drawn anew with the rest.
            if next(tries) % _TRIES_OF_KINDS == 0:
                kinds[:] = drawn_kinds(random)
            return tuple(drawn_model(random, kinds))

        pieces, alone = self._first_legal(
            drawn,
            lambda pieces: self.configured(pieces, ONE_PROCESS),
            lambda pieces, error: mended(pieces, error, keeps=kinds),
        )
        if number // LAYOUTS_OF_A_MODEL % _OF_FAMILIES == 0:
            return self._with_a_family(random, pieces, alone)
        return pieces, alone

    def _with_a_family(self, random: Random, pieces: tuple[str, ...], alone: Config) -> tuple[tuple[str, ...], Config]:
        """Return the model in the shape of a family of Hugging Face near it; the model itself, where none has been
        found."""
        for _ in range(_TRIES_OF_FAMILIES):
            flags = bent(random, pieces, alone)
            try:
                config = self.configured(flags, ONE_PROCESS)
                written_as(config)
            except ConfigurationError:
                continue
            return flags, config
        return pieces, alone

    def layout_of(self, random: Random, model: tuple[str, ...], alone: Config) -> Layout:
        """Return a layout that can train the model."""

        def drawn() -> Layout:
            ranks = random.choice(list(self.ranks))
            return Layout(ranks, tuple(drawn_layout(random, ranks, alone)))

        return self._first_legal(
            drawn,
            lambda layout: self.configured(model, layout),
            lambda layout, error: replace(layout, pieces=mended(layout.pieces, error)),
        )[0]

    def configured(self, model: Sequence[str], layout: Layout) -> Config:
        """Return the configuration of the model in the layout.

        Raises:
            ConfigurationError: they cannot work.
        """
        argv = [*self.data, *words(model), *layout.flags, "--device", "cpu"]
        return configure(argv, world_size=layout.ranks).config

    def _first_legal[T](
        self, draw: Callable[[], T], check: Callable[[T], Config], mend: Callable[[T, ConfigurationError], T]
    ) -> tuple[T, Config]:
        for _ in range(_TRIES):
            drawn = draw()
            for _ in range(_TIMES_MENDED + 1):
                try:
                    return drawn, check(drawn)
                except ConfigurationError as error:
                    self.refused[reason(error)] += 1
                    drawn = mend(drawn, error)
        raise AssertionError(f"none of {_TRIES} draws could work: {self.refused.most_common(5)}")


def reason(error: ConfigurationError) -> str:
    """Return the first problem with its numbers as N and without paths, so that draws refused alike count together."""
    return re.sub(r"\d+(\.\d+)?", "N", re.sub(r"(?<=\s)/\S+", "PATH", str(error.problems[0])))[:200]


def mended(pieces: Sequence[str], error: ConfigurationError, *, keeps: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the pieces as the refusal says that they work, as far as it says so of single flags: without those to
    leave out, and with switches to add.

    Args:
        keeps: pieces that are kept, whatever the refusal says.
    """
    text = " ".join(map(str, error.problems))
    out = {*re.findall(r"leave (?:out )?(--[a-z0-9-]+)", text)}
    switches = {flag_of(one.name) for one in options() if one.type is bool}
    more = [flag for flag in dict.fromkeys(re.findall(r"add (--[a-z0-9-]+)", text)) if flag in switches]
    kept = (piece for piece in pieces if piece in keeps or out.isdisjoint(shlex.split(piece)))
    return (*kept, *more)


def draw(draws: Draws, number: int) -> Draw:
    """Return draw `number` of the seed. One in ten is killed at a random moment."""
    random = Random(f"{draws.seed} layout {number}")
    model, alone = draws.model_of(number)
    first = draws.layout_of(random, model, alone)
    if random.random() < 0.1:
        return Draw(model, first, first, kill=random.random())
    return Draw(model, first, draws.layout_of(random, model, alone))


_PATTERN = "--hybrid-layer-pattern"

RECIPE = (
    "--hidden-size 64 --num-attention-heads 4 --init-method-std 0.1 --train-iters 20 --lr 1e-3 --lr-warmup-iters 10 "
    "--lr-warmup-init 1e-4 --lr-decay-style constant --hidden-dropout 0 --attention-dropout 0"
)


def drawn_kinds(random: Random) -> list[str]:
    """Return the flags of kinds of parts that not every model has, and of the optimizer."""
    experts = draw_experts(random) if random.random() < 0.3 else []
    kinds = [piece for one in brought("draws") for piece in one(random)]
    pattern = next((piece for piece in kinds if _PATTERN in piece), None)
    if pattern is not None:  # which says what each layer is: no other kind may
        ahead = f"--mtp-num-layers 1 --mtp-hybrid-override-pattern {random.choice(('*-', '*'))}"
        kinds, experts = [pattern, *taken(random, (0.15, ahead))], []
        if "E" in shlex.split(pattern)[1]:
            experts = [piece for piece in draw_experts(random) if "--moe-layer-freq" not in piece]
    return [*experts, *kinds, *_optimizer(random)]


def drawn_model(random: Random, kinds: Sequence[str]) -> list[str]:
    """Return the flags of a model with these kinds of parts, its data and its precision."""
    depth = [] if _PATTERN in words(kinds) else [f"--num-layers {random.choice((2, 4, 4, 4, 8))}"]
    logits = ("--lm-head-bias", "--logits-multiplier 0.3", "--final-logit-softcapping 4", "--z-loss-strength 0.01")
    # Many pieces together are refused for some other kind; few leave it room.
    kept = random.choice((0.2, 0.6, 1.0, 1.0))
    pieces = [*draw_norm(random), *draw_attention(random), *draw_mlp(random)]
    return [
        RECIPE,
        *depth,
        *(piece for piece in pieces if random.random() < kept),
        *kinds,
        *taken(random, (0.5, "--untie-embeddings-and-output-weights"), (0.7, "--disable-bias-linear")),
        *taken(random, (0.2, random.choice(logits)), (0.1, "--embedding-multiplier 8")),
        *taken(random, (0.1, "--residual-multiplier 0.7"), (0.05, f"--use-mup {random.choice(_WIDTHS)}")),
        *taken(random, (0.08, random.choice(("--init-method-xavier-uniform", "--embedding-init-method-std 0.05")))),
        *_data(random),
        *taken(random, (0.1, random.choice(_SHORT))),
    ]


_WIDTHS = (
    "--mup-base-hidden-size 16",
    "--mup-base-hidden-size 16 --mup-embedding-mult 3 --mup-output-mult 0.7",
    "--mup-base-head-dim 8 --mup-attn-scale-power 0.5",
    "--mup-base-num-layers 2",
)

_SHORT = (
    "--bf16",
    "--bf16 --accumulate-allreduce-grads-in-fp32",
    "--bf16 --grad-reduce-in-bf16",
    "--fp16 --initial-loss-scale 65536",
)


def _data(random: Random) -> list[str]:
    """Return the flags of batches, and of documents packed into samples."""
    batch, micro = random.choice((4, 8, 8)), random.choice((1, 1, 2))
    packed = ("--reset-position-ids", "--reset-attention-mask", "--reset-position-ids --reset-attention-mask")
    return [
        f"--micro-batch-size {micro} --global-batch-size {batch}",
        *taken(random, (0.35, random.choice(packed)), (0.3, "--make-vocab-size-divisible-by 32")),
        *taken(random, (0.1, f"--rampup-batch-size {batch // 2} {batch // 2} {3 * batch // 2}")),
        *taken(random, (0.1, "--eval-global-batch-size 4 --eval-micro-batch-size 1"), (0.1, "--data-order formula")),
    ]


def _optimizer(random: Random) -> list[str]:
    """Return the flags of an optimizer: any of those that are installed, half of the time Adam."""
    name = random.choice(["adam"] * len(OPTIMIZERS) + list(OPTIMIZERS))
    more = ("--clip-grad 0", "--clip-grad 0.1", "--weight-decay 0.1", "--ema-decay 0.9", "--decoupled-lr 5e-4")
    more += ("--lr-group decoder.layers.1.*=0.5", "--qk-clip --qk-clip-threshold 2.4", "--weight-decay 0")
    more += ("--weight-decay-group *.linear_fc1.weight=0.5", "--qk-clip --qk-clip-threshold 2.4 --qk-clip-alpha 0.3")
    more += ("--ema-decay 0.9 --eval-ema", "--apply-wd-to-qk-layernorm")
    more = tuple(flags for flags in more if not ("--ema" in flags and OPTIMIZERS[name].averages))
    own = OPTIMIZERS[name].drawn
    return [
        f"--optimizer {name}",
        *taken(random, (0.4 * bool(own), random.choice(own or ("",)))),
        *taken(random, (0.4, random.choice(more)), (0.1, random.choice(more))),
    ]


def drawn_layout(random: Random, ranks: int, alone: Config) -> list[str]:
    """Return the flags of a layout.

    Args:
        alone: the configuration of the model in one process.
    """
    sizes = dict.fromkeys(("tensor", "context", "pipeline", "data"), 1)
    for prime in _primes(ranks):
        sizes[random.choice(list(sizes))] *= prime
    pieces = [f"--{axis}-model-parallel-size {sizes[axis]}" for axis in ("tensor", "pipeline") if sizes[axis] > 1]
    if sizes["tensor"] > 1:
        kept = random.choice(("", "", " --sequence-parallel-keep-gathered"))
        pieces += taken(random, (0.65, f"--sequence-parallel{kept}"))
    if sizes["context"] > 1:
        pieces.append(f"--context-parallel-size {sizes['context']} --cp-comm-type {_exchange(random, alone)}")
    if sizes["pipeline"] > 1:
        pieces += _pipeline(random, sizes["pipeline"], alone)
    if alone.model.num_experts is not None:
        pieces += _experts(random, ranks // sizes["pipeline"])
    return [*pieces, *_sharding(random), *_computation(random, alone)]


def _primes(number: int) -> list[int]:
    """Return the prime factors of the number."""
    found = next((prime for prime in range(2, math.isqrt(number) + 1) if number % prime == 0), number)
    return [] if number == 1 else [found, *_primes(number // found)]


def _exchange(random: Random, alone: Config) -> str:
    """Return how context-parallel ranks exchange keys and values: one way, or one for each layer."""
    ways = ("p2p", "all_gather", "a2a")
    if random.random() < 0.2:
        return " ".join(random.choice(ways) for _ in layers(alone))
    return random.choice(ways)


def _pipeline(random: Random, stages: int, alone: Config) -> list[str]:
    """Return how layers are divided over stages, and in which order these take their passes."""
    depths = alone.model.mtp_num_layers or 0
    chunks = random.choice((1, 2, 2, 3))
    each = max(len(layers(alone)) // (stages * chunks), 1)
    sized = (f"--num-virtual-stages-per-pipeline-rank {chunks}", f"--num-layers-per-virtual-pipeline-stage {each}")
    interleaved = [random.choice(sized)] if chunks > 1 else []
    counted = taken(
        random, (0.6, "--account-for-embedding-in-pipeline-split"), (0.6, "--account-for-loss-in-pipeline-split")
    )
    uneven = random.choice(("--decoder-first-pipeline-num-layers 1", "--decoder-last-pipeline-num-layers 1"))
    split = random.choice(
        (
            interleaved,
            interleaved,
            [*interleaved, *counted],
            [uneven],
            [_named_stages(random, stages * chunks, len(layers(alone)), depths)],
        )
    )
    more = (f"--microbatch-group-size-per-virtual-pipeline-stage {2 * stages}", "--no-overlap-p2p-communication")
    return [
        *split,
        *taken(random, (0.4, f"--pipeline-schedule {random.choice(SCHEDULES)}")),
        *taken(random, (0.15 * (chunks > 1), random.choice(more)), (0.15, "--use-tp-pp-dp-mapping")),
    ]


def _named_stages(random: Random, chunks: int, count: int, depths: int) -> str:
    """Return --pipeline-model-parallel-layout: layers are dealt to the chunks at random, depths to the last."""
    cuts = sorted(random.randint(0, count) for _ in range(chunks - 1))
    counts = [end - begin for begin, end in zip([0, *cuts], [*cuts, count], strict=True)]
    stages = ["t" * number for number in counts]
    stages[0], stages[-1] = f"E{stages[0]}", f"{stages[-1]}{'m' * depths}L"
    return f"--pipeline-model-parallel-layout '{'|'.join(stages)}'"


def _experts(random: Random, ranks: int) -> list[str]:
    """Return flags of expert parallelism, drawn at random, for the `ranks` of one pipeline stage."""
    size = random.choice([size for size in range(1, ranks + 1) if ranks % size == 0])
    return [
        *([f"--expert-model-parallel-size {size}"] if size > 1 else []),
        *taken(random, (0.3, "--expert-tensor-parallel-size 1"), (0.5, "--moe-token-dispatcher-type alltoall")),
    ]


def _sharding(random: Random) -> list[str]:
    """Return flags of what data-parallel ranks divide (any sharding scheme), and of when they exchange it."""
    scheme = random.choice((*SCHEMES[:2], *SCHEMES[:2], *SCHEMES))
    asked = " ".join(
        flag_of(name) if value is True else f"{flag_of(name)} {value}" for name, value in scheme.values.items() if value
    )
    own = [
        f"{flag_of(name)}" for name in scheme.own if name not in scheme.values and name != "outer_dp_sharding_strategy"
    ]
    overlap = ["--overlap-grad-reduce", "--overlap-grad-reduce --overlap-param-gather"]
    half = "--optimizer-offload-fraction 0.5"
    moved = ("", half, f"{half} --overlap-cpu-optimizer-d2h-h2d", "--use-torch-optimizer-for-cpu-offload")
    moved += ("--no-pin-cpu-grads --no-pin-cpu-params",)
    in_host = f"--optimizer-cpu-offload {random.choice(moved)}".strip()
    copies = "--num-distributed-optimizer-instances 2"
    copies += random.choice(("", " --outer-dp-sharding-strategy optim"))
    return [
        *([asked] if asked else []),
        *taken(random, (0.5, random.choice(overlap)), (0.4, f"--ddp-bucket-size {random.choice((1, 5000, 20000))}")),
        *taken(random, *((0.2, flag) for flag in own), (0.15, copies), (0.08, in_host)),
        *taken(random, (0.08, "--ckpt-fully-parallel-save"), (0.08, "--ckpt-fully-parallel-load")),
    ]


def _computation(random: Random, alone: Config) -> list[str]:
    """Return flags that change how the results are computed, and not the results: recomputation, fusion and the
    like."""
    each = random.choice((1, 1, 2))
    modules = random.sample(("core_attn", "mlp", "layernorm", "moe"), random.choice((1, 2, 3)))
    if alone.model.num_experts is None and "moe" in modules:
        modules[modules.index("moe")] = "core_attn"
    again = (
        f"--recompute-granularity full --recompute-num-layers {each} --recompute-method uniform",
        f"--recompute-granularity full --recompute-num-layers {each} --recompute-method block",
        f"--recompute-granularity selective --recompute-modules {' '.join(dict.fromkeys(modules))}",
        "--recompute-activations",
        *(["--moe-layer-recompute"] if alone.model.num_experts is not None else []),
    )
    graphs = f"--cuda-graph-impl {random.choice(('full_iteration', 'local'))}"
    kernels = ("--disable-jit-fuser", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion", "--no-triton-kernels")
    checks = ("--check-for-large-grads", "--check-before-update", "--check-replicated-weights-interval 1")
    checks += ("--check-weight-hash-across-dp-replicas-interval 1",)
    return [
        *taken(random, (0.35, random.choice(again)), (0.2, "--linear-cross-entropy")),
        *taken(random, (0.2, "--gradient-accumulation-fusion"), (0.04, graphs), (0.1, random.choice(kernels))),
        *taken(random, (0.05, "--deterministic-mode"), (0.1, random.choice(checks))),
        *taken(random, (0.05, f"--attention-backend {random.choice(('local', 'unfused'))}")),
    ]
