"""Run by test_cuda_path.py as fake_gpu.py is: a whole forward pass in training, loss included, on fake CUDA tensors.

One rank of a world of torch's fake process groups builds the model as a GPU's rank would, and computes the loss of a
microbatch. Every operator sees shapes, types and devices as on a GPU, and every Triton kernel is launched: by a
stand-in that looks at what it is given.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import random
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves

from benchmarks.rehearsed_world import played
from megatron_ext.config.schema import Config
from megatron_ext.data.packing import documents_of
from megatron_ext.device.triton import cross_entropy, kernel_choice, norm, rotary, swiglu
from megatron_ext.model.config import transformer_config
from megatron_ext.model.gpt import build_model
from megatron_ext.model.loss import summed_loss, token_loss
from megatron_ext.parallel import groups
from megatron_ext.parts.linear.compute import overlap_communication
from tests.support.fake_tensors import backward, on_gpu
from tests.support.operator_calls import Calls, aten
from tests.support.small_models import LLAMA, OLMO2, small_config

SEQUENCE, SAMPLES = 16, 2
DOCUMENTS = documents_of(torch.arange(SAMPLES * SEQUENCE).view(SAMPLES, SEQUENCE) % 5, eod=4)
GPU: Any = type("Gpu", (), {"kind": "cuda", "backend": "fake", "backend_with_host": "fake"})()


class Launches:
    """Stands in for `choice.launch`, and holds what each kernel was given against what its launcher takes."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, kernel: Any, grid: tuple[int, ...], *given: Any, **constants: Any) -> None:
        constants.pop("num_warps")
        assert kernel.arg_names == [*kernel.arg_names[: len(given)], *constants], "each parameter once, in order"
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        assert {tensor.device.type for tensor in tensors} == {"cuda"}
        assert all(type(value) in (int, float) for value in given if not isinstance(value, torch.Tensor))
        assert len(grid) <= 3
        limits = zip(grid, (2**31 - 1, 65535, 65535), strict=False)  # how many tokens an expert has, nobody knows
        assert all(0 < size <= limit for size, limit in limits if isinstance(size, int))
        self.names.append("of sum" if constants.get("HAS_RESIDUAL") else kernel.fn.__name__)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    made = Launches()
    for module in (cross_entropy, norm, rotary, swiglu):
        monkeypatch.setattr(module, "launch", made)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_device: (9, 0))
    # Dropout masks are drawn from generators of a GPU, which are not there.
    monkeypatch.setattr(random.CudaRNGStatesTracker, "fork", lambda _self, _name=None: nullcontext())
    kernel_choice.use(True)
    yield made
    kernel_choice.use(False)


@contextmanager
def on_a_fake_gpu(config: Config) -> Iterator[tuple[Any, Calls]]:
    """The model of a rank of `config`, and its operators."""
    with played(0, config.layout.world_size):
        collection = groups.initialize(config.layout, GPU)
        (chunk,) = build_model(config, transformer_config(config, "cuda", on_meta=True), collection, on_meta=True)
        with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()), Calls() as calls:
            move(chunk)
            yield chunk.train(), calls


def move(chunk: Any) -> None:
    """Put a model that has no memory on the fake GPU, as `Module.to` cannot."""
    moved: dict[int, torch.nn.Parameter] = {}
    for module in chunk.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in moved:
                there = torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda")
                moved[id(parameter)] = torch.nn.Parameter(there)
                for attribute, value in vars(parameter).items():
                    setattr(moved[id(parameter)], attribute, value)
            module._parameters[name] = moved[id(parameter)]
    if getattr(chunk, "rotary_pos_emb", None) is not None:
        chunk.rotary_pos_emb.inv_freq = torch.empty(chunk.rotary_pos_emb.inv_freq.shape, device="cuda")


def loss_of(chunk: Any, *, packed: bool = False, summed: bool = False) -> torch.Tensor:
    """The loss of a microbatch: of every token of this rank, or the sum over those that count."""
    sequence = SEQUENCE // chunk.config.context_parallel_size
    tokens = torch.empty(SAMPLES, sequence, dtype=torch.int64, device="cuda")
    documents = None
    if packed:
        chunk.restarts_positions = True
        documents = DOCUMENTS.map(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda"))
    mask = torch.empty(SAMPLES, SEQUENCE, device="cuda") if summed else None
    return chunk(tokens, tokens, None, labels=tokens, documents=documents, loss_mask=mask)


BF16 = {"bf16": True}
TP2 = {"world_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}
CP2 = {"world_size": 2, "context_parallel_size": 2}
EXPERTS = {**LLAMA, "num_experts": 4, "moe_router_topk": 2, "moe_grouped_gemm": True}
HEADS, OF_SUM, ALONE, SWIGLU, TURN = "split_heads_kernel", "of sum", "norm_forward", "swiglu_forward", "rotate_kernel"

# Kernels of one layer, in their order, between those of the model, which ends with a norm.
WHOLE: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, bool], list[str]]] = {
    "Llama": (LLAMA, {}, BF16, {}, [ALONE, HEADS, OF_SUM, SWIGLU]),
    "GPT-2": ({}, {}, BF16, {}, [ALONE, OF_SUM]),
    "fp32": (LLAMA, {}, {}, {}, [ALONE, HEADS, OF_SUM, SWIGLU]),
    "norms of heads": (
        {**LLAMA, "qk_layernorm": True},
        {},
        BF16,
        {},
        [ALONE, ALONE, ALONE, TURN, TURN, OF_SUM, SWIGLU],
    ),
    "norms after": (OLMO2, {}, BF16, {}, [ALONE, ALONE, TURN, TURN, ALONE, SWIGLU, ALONE]),
    "dropout": ({**LLAMA, "hidden_dropout": 0.1}, {}, BF16, {}, [ALONE, HEADS, ALONE, SWIGLU]),
    "TP2, SP": (LLAMA, TP2, BF16, {}, [ALONE, HEADS, OF_SUM, SWIGLU]),
    "TP2, SP, GPT-2": ({}, TP2, BF16, {}, [ALONE, ALONE]),
    "CP2": (LLAMA, {**CP2, "cp_comm_type": ("all_gather",)}, BF16, {}, [ALONE, HEADS, OF_SUM, SWIGLU]),
    "packed documents": (LLAMA, {}, BF16, {"packed": True}, [ALONE, HEADS, OF_SUM, SWIGLU]),
    "experts": (EXPERTS, {}, BF16, {}, [ALONE, HEADS, OF_SUM, SWIGLU]),
    "FP8": (LLAMA, {}, {**BF16, "fp8_format": "hybrid"}, {}, [ALONE, HEADS, OF_SUM, SWIGLU]),
    "loss with its output layer": (
        LLAMA,
        {},
        {**BF16, "linear_cross_entropy": True},
        {"summed": True},
        [ALONE, HEADS, OF_SUM, SWIGLU],
    ),
    "gradients added": (LLAMA, TP2, {**BF16, "gradient_accumulation_fusion": True}, {}, [ALONE, HEADS, OF_SUM, SWIGLU]),
    "nothing fused": (LLAMA, {}, {**BF16, "disable_jit_fuser": True}, {}, [ALONE, HEADS, ALONE]),
}
OTHERS_IN_GRAPHS = ("norms of heads", "loss with its output layer", "nothing fused")
# The others are slow: another model or setting with the same calls.
DAILY = ("Llama", "GPT-2", "norms of heads", "TP2, SP", "packed documents", "experts")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in DAILY)) for name in WHOLE])
def test_a_whole_forward_pass(name: str, launches: Launches) -> None:
    model, layout, training, how, of_layer = WHOLE[name]
    config = small_config({"num_layers": 2, **model}, layout, training)
    with on_a_fake_gpu(config) as (chunk, calls):
        losses = loss_of(chunk, **how)
    assert tuple(losses.shape) == (
        () if how.get("summed") else (SAMPLES, SEQUENCE // config.layout.context_parallel_size)
    )
    assert (losses.dtype, losses.device.type) == (torch.float32, "cuda")
    assert losses.requires_grad
    by_kernel = not how.get("summed") and config.layout.tensor_model_parallel_size == 1
    # Where sums are normalized as they are made, the first layer does so for the second one.
    of_second = [OF_SUM, *of_layer[1:]] if OF_SUM in of_layer else of_layer
    assert launches.names == [*of_layer, *of_second, ALONE, *["cross_entropy_forward"] * by_kernel]
    if "num_experts" not in model:
        assert not [func for func, _, _ in calls.calls if "_local_scalar_dense" in str(func)], (
            "nobody waits for the GPU"
        )


@pytest.mark.parametrize(
    "name", ["Llama", "GPT-2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("fp32", *OTHERS_IN_GRAPHS))]
)
def test_a_forward_pass_that_a_graph_captures_touches_nothing_in_host_memory(name: str, launches: Launches) -> None:
    """A number from there would stay what it is at the capture. The first pass may move what the next ones need."""
    model, layout, training, how, _ = WHOLE[name]
    of_loss = summed_loss if how.get("summed") else token_loss
    with on_a_fake_gpu(small_config({"num_layers": 2, **model}, layout, training)) as (chunk, calls):
        loss_of(chunk, **how)
        calls.calls.clear()
        mask = torch.empty(SAMPLES, SEQUENCE, device="cuda")
        of_loss(mask, loss_of(chunk, **how))
    assert calls.calls
    tensors = (leaf for _, *values in calls.calls for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    assert {tensor.device.type for tensor in tensors} == {"cuda"}


@pytest.mark.parametrize(("channels", "copied"), [(16, False), (12, True)])
def test_heads_are_not_copied_where_nothing_turns_them(
    channels: int, copied: bool, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2's attention reads its heads out of the product, if they begin at multiples of 16 bytes."""
    attended: list[torch.Tensor] = []
    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *heads, **how: attended.extend(heads) or attend(*heads, **how)
    )
    config = small_config({"num_layers": 1, "kv_channels": channels}, training=BF16)
    with on_a_fake_gpu(config) as (chunk, _):
        loss_of(chunk)
    query, _, _ = attended
    assert query.shape == (SAMPLES, 4, SEQUENCE, channels)
    assert query.is_contiguous() == copied
    assert query.stride(-1) == 1


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "norms of heads", "experts"])
def test_modules_are_called_whose_weights_are_read(name: str, launches: Launches) -> None:
    """Where weights are gathered while others compute, a hook of each module waits for its own."""
    model, layout, training, how, _ = WHOLE[name]
    called: set[str] = set()
    with on_a_fake_gpu(small_config({"num_layers": 2, **model}, layout, training)) as (chunk, _):
        with_weights = {key for key, module in chunk.named_modules() if any(True for _ in module.parameters(False))}
        for key, module in chunk.named_modules():
            module.register_forward_pre_hook(lambda *_given, key=key: called.add(key))
        loss_of(chunk, **how)
    assert with_weights - called == set()


KERNELS = {
    "cuDNN": lambda heads, scale: aten._scaled_dot_product_cudnn_attention(*heads, None, True, scale=scale)[0],
    "flash": lambda heads, scale: aten._scaled_dot_product_flash_attention(*heads, 0.0, True, scale=scale)[0],
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("model", [{}, {"qk_layernorm": True}, {"rotary_interleaved": True}], ids=str)
def test_the_context_of_whole_sequences_is_never_copied(
    model: dict[str, Any], kernel: str, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both of torch's kernels write in the order of the queries: that of tokens, in which the next product reads, and
    in which the gradient of the context comes back."""
    contexts: list[torch.Tensor] = []
    states: list[torch.Tensor] = []

    def attend(*heads: torch.Tensor, scale: float, **_how: Any) -> torch.Tensor:
        assert heads[0].permute(2, 0, 1, 3).is_contiguous()
        assert heads[1].permute(2, 0, 1, 3).is_contiguous()
        contexts.append(KERNELS[kernel](heads, scale))
        return contexts[-1]

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    with on_a_fake_gpu(small_config({"num_layers": 1, **LLAMA, **model}, training=BF16)) as (chunk, _):
        attention: Any = chunk.decoder.layers[0].self_attention
        attention.linear_proj.register_forward_pre_hook(lambda _linear, given: states.append(given[0]))
        loss_of(chunk)
    (context,), (given,) = contexts, states
    assert given.is_contiguous()
    assert given.untyped_storage()._cdata == context.untyped_storage()._cdata


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ({"window_size": "7,0"}, {}),
        ({}, {**CP2, "cp_comm_type": ("all_gather",)}),
        ({}, {**CP2, "cp_comm_type": ("a2a",)}),
    ],
    ids=str,
)
def test_other_attention_reads_each_heads_rows_one_after_another(
    model: dict[str, Any], layout: dict[str, Any], launches: Launches
) -> None:
    given: list[torch.Tensor] = []
    with on_a_fake_gpu(small_config({"num_layers": 1, **LLAMA, **model}, layout, training=BF16)) as (chunk, _):
        core: Any = chunk.decoder.layers[0].self_attention.core_attention
        core.register_forward_pre_hook(lambda _core, heads: given.extend(heads[:3]))
        loss_of(chunk)
    assert [head.is_contiguous() for head in given] == [True] * 3


def test_no_layer_reads_ahead_with_weights_that_are_not_there(launches: Launches) -> None:
    """Those of the next layer are yet to be gathered."""
    with on_a_fake_gpu(small_config({"num_layers": 2, **LLAMA}, {"world_size": 2, "use_torch_fsdp2": True}, BF16)) as (
        chunk,
        _,
    ):
        loss_of(chunk)
    of_layer = [ALONE, HEADS, OF_SUM, SWIGLU]
    assert launches.names == [*of_layer, *of_layer, ALONE, "cross_entropy_forward"]


def test_one_flag_leaves_torchs_operations(launches: Launches) -> None:
    kernel_choice.use(False)
    with on_a_fake_gpu(small_config({"num_layers": 1, **LLAMA}, training=BF16)) as (chunk, calls):
        assert loss_of(chunk).dtype == torch.float32
    assert launches.names == []
    assert [func for func, _, _ in calls.calls if func is aten._fused_rms_norm.default]


def test_gradients_on_a_gpu_have_the_shapes_of_what_they_are_of(launches: Launches) -> None:
    with FakeTensorMode():
        x, residual, weight = (on_gpu(*shape).requires_grad_() for shape in ((6, 2, 40), (6, 2, 40), (40,)))
        normed, total = norm.norm_of_sum(x, residual, weight, weight, 1e-5)
        assert (normed.shape, total.shape) == (x.shape, x.shape)
        alone = norm.rms_norm(x, weight, 1e-5)
        packed = on_gpu(16, 2, 3, 4 * 8).requires_grad_()
        table = on_gpu(2, 2, 1, 16, 4)
        query, key, value = rotary.split_heads(packed, table, 8)
        assert (query.shape, key.shape, value.shape) == ((2, 6, 16, 8), (2, 3, 16, 8), (2, 3, 16, 8))
        turned = rotary.rotate(query.detach().requires_grad_(), table)
        weights = on_gpu(12, dtype=torch.float32).requires_grad_()
        gated = swiglu.swiglu(on_gpu(12, 40).requires_grad_(), weights)
        assert gated.shape == (12, 20)
        made = [
            backward(alone, "_NormBackward", on_gpu(6, 2, 40)),
            backward(turned, "_RotationBackward", on_gpu(2, 6, 16, 8)),
            backward(gated, "_SwiGLUBackward", on_gpu(12, 20)),
        ]
    assert [[tuple(tensor.shape) for tensor in tensors] for tensors in made] == [
        [(6, 2, 40), (40,)],
        [(2, 6, 16, 8)],
        [(12, 40), (12,)],
    ]
    assert made[2][1].dtype == torch.float32, "that of the router's weights"
    assert launches.names[-3:] == ["norm_backward", "rotate_kernel", "swiglu_backward"]


@pytest.mark.parametrize("fused", [False, True])
def test_tensor_parallel_layers_overlap_on_a_gpu(fused: bool, launches: Launches) -> None:
    """Both passes call torch's operators over symmetric memory, which decide the shapes: each gathers or scatters the
    sequence."""
    symm_mem: Any = torch.ops.symm_mem
    config = small_config(LLAMA, {**TP2, "tp_comm_overlap": True}, BF16)
    with on_a_fake_gpu(config) as (chunk, calls):
        overlap_communication(chunk)
        loss_of(chunk)
        gathers = symm_mem.fused_all_gather_matmul.default, symm_mem.fused_matmul_reduce_scatter.default
        called = [operator for operator, _, _ in calls.calls if operator in gathers]
        assert called == [*gathers, *gathers] * config.model.num_layers
        layer = chunk.decoder.layers[0]
        for linear, gathered, name in ((layer.mlp.linear_fc1, 0, "_Columns"), (layer.mlp.linear_fc2, 1, "_Rows")):
            x = on_gpu(SEQUENCE // (2 - gathered), SAMPLES, linear.weight.size(1)).requires_grad_()
            weight = linear.weight
            if fused:
                linear.gradient_accumulation_fusion = True
                weight.main_grad = torch.empty(weight.shape, device="cuda")
                weight.grad_added_to_main_grad = False
            result = linear(x)[0]
            assert result.shape == (SEQUENCE // (1 + gathered), SAMPLES, weight.size(0))
            calls.calls.clear()
            made = backward(result, f"{name}Backward", torch.empty_like(result))
            assert [one.shape for one in made] == [x.shape, weight.shape]
            assert {one.device.type for one in made} == {"cuda"}
            assert [operator for operator, _, _ in calls.calls if operator in gathers] == [gathers[1 - gathered]]
            added = [given for operator, given, _ in calls.calls if operator is aten.addmm.dtype_out]
            assert len(added) == fused
            if fused:
                assert weight.grad_added_to_main_grad
