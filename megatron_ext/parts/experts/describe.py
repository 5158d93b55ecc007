"""Describes a mixture of experts, which takes the place of an MLP.

An expert's input, what is inside it (4 F with SwiGLU) and that times the router's weight count for every (token,
expert) pair; an even load is assumed. E and e are the experts' parallel size and tensor-parallel size, k the experts of
a token, T a rank's part of the activations, which it routes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, NamedTuple

from megatron_ext.config.parse.options import flag_of
from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.parts.mlp.describe import Mlp, mlp_of
from megatron_ext.parts.parameter import Parameter
from megatron_ext.parts.protocol import Exchange, Number, Part, Place, Product, Share, State, taken

# Indices of a (token, expert) pair; a probability and a mark for each expert. Counted.
_OF_A_PAIR, _OF_A_LOGIT = 24, 5

GROUPED_ALIGNMENT = 8
"""Divisor that an expert's rows and columns need for a grouped product, whose kernel reads 16 bytes of bf16 at once."""

# By megatron-core's names, under which its router records them, and Megatron-LM's tags and names in the log line. A
# balanced load has the loss 1.
_BALANCE = {
    of: Number(name, "of microbatches", "", name, name)
    for of, name in (
        ("aux_loss", "load_balancing_loss"),
        ("seq_aux_loss", "seq_load_balancing_loss"),
        ("global_aux_loss", "global_load_balancing_loss"),
    )
}
_Z = Number("z_loss", "of microbatches", "nats^2", "z_loss", "z_loss")


class Capacity(NamedTuple):
    """Largest number of tokens of a microbatch that an expert takes in training (Lepikhin et al. 2020,
    arXiv:2006.16668, section 2.2)."""

    factor: float
    """This number over the tokens of an expert in an even load."""

    policy: str
    """Which tokens a full expert takes: the tokens with the greatest weights ("probs"), or the first ones
    ("position")."""


@dataclass(frozen=True)
class Experts(Part):
    """A mixture of experts, which takes the place of an MLP."""

    modules = ("router", "fc1_latent_proj", "linear_fc1", "linear_fc2", "fc2_latent_proj")

    count: int
    top_k: int
    """Number of experts that compute each token."""

    mlp: Mlp
    """MLP that each routed expert is."""

    shared: Mlp | None
    """MLP of the shared experts together, which computes every token; None without shared experts."""

    shared_gate: bool = False
    """Whether a sigmoid gate of each token multiplies the shared experts' output."""

    averaged: bool = False
    """Whether the outputs of routed and of shared experts are averaged, and not added."""

    has_bias: bool = False
    """Whether experts are chosen by scores with a bias of each, which is state and not trained by gradients."""

    bias_of_logits: bool = False
    """Whether that bias is added to the router's logits, and not to their scores."""

    unnormalized: bool = False
    """Whether scores that are no softmax weigh a token's experts without being divided by their sum."""

    group_scores: int | None = None
    """Number of best scores of a group of experts that are added up, where megatron-core's number differs."""

    capacity: Capacity | None = None
    """Capacity of an expert; None where it takes all tokens that are routed to it."""
    sparse_mixer: float | None = None
    """Distance from the largest logit, relative to it and halved, within which two experts are chosen one after the
    other (SparseMixer-v2, Liu et al. 2024, arXiv:2409.12136); None: the top k are chosen."""
    latent: int | None = None
    """Width of the routed experts' input and output, between two projections; None: the hidden size."""

    @property
    def blocks(self) -> int:
        """Number of gathers of the shared experts' input; the exchange of routed experts' tokens is in `sent`."""
        return 0 if self.shared is None else self.shared.blocks

    def parameters(self, place: Place) -> Iterator[Parameter]:
        """Yield the router, the routed experts, and the shared ones."""
        own = {"sequence_parallel": True, "by_element": True}  # its rows are no channels
        yield place.matrix("router.weight", self.count, place.model.hidden_size, **own)
        hidden, latent = place.model.hidden_size, self.latent
        if self.mlp.bias:  # which begins as the weight, as megatron-core's
            yield replace(place.matrix("router.bias", self.count, 1, sequence_parallel=True), shape=(self.count,))
        if latent is not None:
            yield place.matrix("fc1_latent_proj.weight", latent, hidden, sequence_parallel=True)
            yield place.matrix("fc2_latent_proj.weight", hidden, latent, adds=True, sequence_parallel=True)
        for expert in range(self.count) if place.experts is None else place.experts:
            yield from self.mlp.parameters(place.inside(f"experts.{expert}"), expert, latent)
        if self.shared is not None:
            if self.shared_gate:
                yield place.inside("shared_experts").matrix("gate_weight", 1, hidden, sequence_parallel=True)
            yield from self.shared.parameters(place.inside("shared_experts"))

    def state(self, place: Place) -> Iterator[State]:
        """Yield the bias of experts, and the state that is saved with the linear layers of shared experts."""
        if self.has_bias:
            yield State(f"{place.name}.router.expert_bias", "buffer", (self.count,))
        if self.shared is not None:
            yield from self.shared.state(place.inside("shared_experts"))

    def products(self, share: Share) -> list[Product]:
        """Return the products of the router, of the shared experts, and of the routed experts that the rank has; an
        even load is assumed."""
        own = share.tokens / share.tensor
        each = own * self.top_k * share.experts * share.expert_tensor / self.count
        routed = self.mlp.products_of(share, each, share.expert_tensor, self.latent)
        latent = self.latent
        return [
            Product(own, self.count, share.hidden),
            *([] if latent is None else [Product(own, latent, share.hidden), Product(own, share.hidden, latent)]),
            *([] if self.shared is None else self.shared.products(share)),
            *(product._replace(number=self.count / share.experts, routed=True) for product in routed),
        ]

    def held(self, share: Share) -> Mapping[str, float]:
        """Return the bytes of the pairs, of their inside, and of the router's."""
        own = share.tokens / share.divided
        # Every rank of an expert's tensor-parallel group has all of its pairs.
        pairs = self.top_k * own * share.expert_tensor
        inside = (5 if self.mlp.gated else 3) * share.width * self.mlp.width / share.expert_tensor
        if self.mlp.bias:  # matrices that have a weight at each pair's expert
            inside += 2 * share.width * self.count / share.experts
        held = pairs * (share.width * self.read_by(share) + inside + _OF_A_PAIR) + own * self.count * _OF_A_LOGIT
        if self.latent is not None:  # what the projection up reads
            held += own * self.latent * share.width
        if self.shared is not None:
            held += self.shared.inside(share, gated=5) * share.tokens / share.tensor
        return {"mlp": held}

    def read_by(self, share: Share) -> int:
        """Return the channels of the routed experts' input."""
        return self.latent or share.hidden

    def gradients(self, share: Share) -> float:
        """Return gradient bytes: half of the held activations."""
        return self.held(share)["mlp"] / 2

    def numbers(self, config: Config) -> Iterator[Number]:
        """Yield the auxiliary losses of the router, which are reported without their coefficients."""
        yield from (_BALANCE[loss] for loss in config.model.load_balancing_losses)
        if config.model.moe_z_loss_coeff is not None:
            yield _Z

    def sent(self, share: Share) -> Iterator[Exchange]:
        """Yield the exchanges that route tokens to their experts and back, forward and again backward."""
        ep, etp = share.experts, share.expert_tensor
        if ep * etp == 1:
            return
        own = share.tokens * self.read_by(share) * share.width / share.tensor
        if share.config.layout.moe_token_dispatcher_type == "allgather":
            others, formula = ep * etp - 1, "m {layers} (E e - 1) T"
            # Besides the tokens: which experts each has, forward in bytes, and with which weights, in fp32.
            weights = 4 * share.tokens / share.tensor * self.count
            together = share.config.model.moe_router_dtype in (None, f"fp{8 * share.width}")
            if together and share.config.layout.device == "cpu":
                both = 2 * others * (own + share.width * share.tokens / share.tensor * self.count)
                yield Exchange("ep", "all-to-all", 2 * others * own, both, (2, 2), f"2 {formula}", "mlp")
                return
            for collective, times in (("all-gather", 1.25), ("reduce-scatter", 1.0)):
                forward, backward = others * own, others * (own + times * weights)
                yield Exchange("ep", collective, forward, backward, (1, 1), formula, "mlp")
            return
        both = 2 * self.top_k * (ep - 1) / ep * own
        yield Exchange("ep", "all-to-all", both, both, (2, 2), "2 m {layers} k (E-1)/E T", "mlp")
        if etp > 1:
            each = self.top_k * (etp - 1) * own
            yield Exchange("ep", "all-gather", each, each, (1, 1), "m {layers} k (e-1) T", "mlp")
            yield Exchange("ep", "reduce-scatter", each, each, (1, 1), "m {layers} k (e-1) T", "mlp")

    def cannot(self, config: Config) -> Iterator[str]:
        """Yield the settings that a mixture of experts cannot be combined with, each with a setting that works."""
        layout = config.layout
        if self.mlp.activation == "xielu":
            yield (
                "--num-experts with --xielu, whose numbers would be those of each expert; use --squared-relu instead "
                "of --xielu"
            )
        if self.mlp.bias and self.shared is not None:
            added = config.model.disable_bias_linear
            yield (
                f"--moe-shared-expert-intermediate-size with {'--add-mlp-bias' if added else 'biases everywhere'}: "
                f"shared experts have none; {'leave --add-mlp-bias out' if added else 'add --disable-bias-linear'}"
            )
        if self.capacity is not None and self.capacity.policy == "position" and layout.context_parallel_size > 1:
            yield (
                f"--moe-token-drop-policy position with --context-parallel-size {layout.context_parallel_size}, whose "
                "ranks have tokens from both ends of a sample; use --moe-token-drop-policy probs"
            )
        if self.sparse_mixer is not None:
            yield from _otherwise_chosen(config.model)
        if self.unnormalized and config.model.is_sinkhorn:
            yield (
                "--moe-router-unnormalized with --moe-router-load-balancing-type sinkhorn, whose weights are never "
                "divided by their sum; leave --moe-router-unnormalized out"
            )
        if layout.tensor_model_parallel_size > 1 and not layout.sequence_parallel:
            yield (
                f"--num-experts with --tensor-model-parallel-size {layout.tensor_model_parallel_size} would route "
                "every token on every tensor-parallel rank; add --sequence-parallel"
            )
        if config.training.torch_compile:
            yield (
                "--num-experts with --torch-compile: how many tokens an expert gets differs at every step, and each "
                "number would be compiled anew; leave --torch-compile out"
            )


_USUAL: Mapping[str, tuple[Any, ...]] = {
    "moe_layer_freq": ("1", "-1"),  # -1 is MindSpeed's word for all
    "moe_router_num_groups": (1,),
    "moe_router_group_topk": (1,),
    "moe_router_topk_scaling_factor": (1.0,),
}
"""Values by which a field asks for nothing, besides None and False."""


def asked(model: ModelConfig, *names: str) -> list[str]:
    """Return the flags, of the named fields, whose value asks for something."""
    values = ((name, getattr(model, name)) for name in names)
    asking = ((name, value) for name, value in values if value is not None and value is not False)
    return [flag_of(name) for name, value in asking if value not in _USUAL.get(name, ())]


def _otherwise_chosen(model: ModelConfig) -> Iterator[str]:
    """Yield the flags that ask for another choice of experts than SparseMixer's."""
    for flag, value, usual in (
        ("--moe-router-topk", model.moe_router_topk, 2),
        ("--moe-router-score-function", model.moe_router_score_function, "softmax"),
        ("--moe-router-load-balancing-type", "sinkhorn" if model.is_sinkhorn else "none", "none"),
    ):
        if value != usual:
            of_another = f"chooses experts in its own way, but {flag} is {value}"
            yield f"--moe-router-sparsemixer-eps {of_another}; use {flag} {usual}"
    others = ("enable_expert_bias", "num_groups", "topk_scaling_factor", "pre_softmax")
    for flag in asked(model, *(f"moe_router_{other}" for other in others)):
        yield f"--moe-router-sparsemixer-eps chooses and weighs experts in its own way; leave {flag} out"


def experts_of(model: ModelConfig, count: int) -> Experts:
    """Return the model's mixture of `count` experts."""
    shared, factor = model.moe_shared_expert_intermediate_size, model.moe_expert_capacity_factor
    return Experts(
        count=count,
        top_k=model.moe_router_topk,
        mlp=mlp_of(model, model.expert_ffn_hidden_size),
        shared=None if shared is None else mlp_of(model, shared),
        shared_gate=shared is not None and model.moe_shared_expert_gate,
        averaged=shared is not None and model.moe_shared_expert_average,
        has_bias=model.moe_router_enable_expert_bias,
        bias_of_logits=model.moe_router_enable_expert_bias and model.moe_router_bias_of == "logits",
        unnormalized=model.moe_router_unnormalized and model.moe_router_score_function != "softmax",
        group_scores=model.moe_router_group_scores,
        capacity=None if factor is None else Capacity(factor, model.moe_token_drop_policy),
        sparse_mixer=model.moe_router_sparsemixer_eps,
        latent=model.moe_latent_size,
    )


_SHARED = ("", " --moe-shared-expert-gate", " --moe-shared-expert-average")


def draw(random: Random) -> list[str]:
    """Return flags of a mixture of experts, drawn at random. Routers compute in fp64: of two layouts that round
    otherwise, one would choose other experts more often."""
    count, used = random.choice((4, 8)), random.choice((1, 2, 2, 4))
    dropped = f"--moe-expert-capacity-factor 0.8 --moe-token-drop-policy {random.choice(('probs', 'position'))}"
    return [
        f"--num-experts {count} --moe-ffn-hidden-size {random.choice((16, 48))} --moe-router-dtype fp64",
        f"--moe-router-topk {used}",
        *_drawn_choice(random, count, used),
        *taken(random, (0.15, dropped)),
        *taken(random, (0.4, "--moe-z-loss-coeff 0.01"), (0.15, "--moe-latent-size 24"), (0.1, "--moe-grouped-gemm")),
        *taken(random, (0.3 * (used == 1), "--moe-apply-probs-on-input")),
        *taken(random, (0.4, f"--moe-layer-freq {random.choice(('2', '[0,1,1,1]', '[0,1,0,1]'))}")),
        *taken(random, (0.4, f"--moe-shared-expert-intermediate-size 40{random.choice(_SHARED)}")),
    ]


def _drawn_choice(random: Random, count: int, used: int) -> list[str]:
    """Return flags of scores, of the choice of `used` of `count` experts by them, and of what balances it."""
    own = random.random()
    if own < 0.1:
        return ["--moe-router-sparsemixer-eps 1e-9" if own < 0.05 else "--moe-router-load-balancing-type sinkhorn"]
    balance = random.choice(("aux_loss", "seq_aux_loss", "global_aux_loss", "none", "aux_loss global_aux_loss"))
    losses = f"--moe-aux-loss-coeff{' 0.1' * len(balance.split())}"
    scores = random.choice(("softmax" if used > 1 else "sigmoid", "softmax --moe-router-pre-softmax", "sigmoid"))
    scores = random.choice((scores, scores, scores, "sqrtsoftplus"))
    rate = "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.02"
    rate += random.choice(("", "", " --moe-router-bias-of logits"))
    groups = "--moe-router-num-groups 2 --moe-router-group-topk 1"
    groups += random.choice(("", "", " --moe-router-group-scores 1"))
    return [
        f"--moe-router-score-function {scores}",
        *taken(random, (0.6, f"--moe-router-load-balancing-type {balance} {losses}")),
        *taken(random, (0.35, rate), (0.25 * (2 * used <= count), groups)),
        *taken(random, (0.2, "--moe-router-topk-scaling-factor 2.5")),
        *taken(random, (0.2 * (used > 1 and "softmax" not in scores), "--moe-router-unnormalized")),
    ]
