"""Run by test_cuda_path.py as fake_gpu.py is: the output layer, its loss and weight gradients on fake CUDA tensors."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_ext.device.kernels import grouped_linear
from megatron_ext.device.weight_gradients import ProductsOfTorch, add_product_, stand_in
from megatron_ext.model.linear_cross_entropy import Vocabulary, linear_cross_entropy
from megatron_ext.model.loss import Readout
from megatron_ext.parts.experts.compute import rows_of_biases
from tests.support.fake_tensors import backward, on_gpu
from tests.support.operator_calls import Calls, aten

TRUE_ROWS, ROWS, HIDDEN = 50_257, 50_304, 768


def skip_without_fake_sums() -> None:
    """torch 2.11 takes the dtype of an addmm's result for a factor where tensors are fake."""
    try:
        with FakeTensorMode():
            torch.addmm(on_gpu(2, 2, dtype=torch.float32), on_gpu(2, 2), on_gpu(2, 2), out_dtype=torch.float32)
    except TypeError:
        pytest.skip("this torch has no fake addmm of 16-bit factors into fp32")


def test_the_product_adds_16_bit_factors_to_a_sum_in_fp32() -> None:
    """One operator, whose result is the sum that it was given."""
    skip_without_fake_sums()
    with FakeTensorMode(), Calls() as calls:
        main = on_gpu(ROWS, HIDDEN, dtype=torch.float32)
        add_product_(main, on_gpu(4096, ROWS), on_gpu(4096, HIDDEN))
        ProductsOfTorch.wgrad_gemm_accum_fp32(on_gpu(4096, HIDDEN), on_gpu(4096, ROWS), main)
    made = [(args, out) for func, args, out in calls.calls if func is aten.addmm.dtype_out]
    assert [out is main for _, out in made] == [True, True]
    (added, grad, x, dtype), _ = made[0]
    assert (added is main, tuple(grad.shape), tuple(x.shape), dtype) == (
        True,
        (ROWS, 4096),
        (4096, HIDDEN),
        torch.float32,
    )
    assert not [
        func for func, _, _ in calls.calls if func in (aten.mm.default, aten.add_.Tensor, aten._to_copy.default)
    ]


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_experts_are_one_product_that_no_host_waits_for(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many rows each has stays on the device, and that some have none, whose gradients Blackwell does not write."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_args: capability)
    with FakeTensorMode(), Calls() as calls:
        counts, rows, matrices = torch.empty(4, device="cuda", dtype=torch.int64), on_gpu(96, 64), on_gpu(4, 80, 64)
        out = grouped_linear(rows, matrices.requires_grad_(), counts)
        biased = out + rows_of_biases(on_gpu(4, 80), counts, 96, on_gpu(96, dtype=torch.float32))
        node: Any = out.grad_fn
        of_matrices: Any = SimpleNamespace(grad_fn=node.next_functions[1][0])
        if capability >= (10, 0):
            (gradient,) = backward(of_matrices, "_ZeroGradientOfEmptyBackward", on_gpu(4, 80, 64))
            assert (gradient.dtype, tuple(gradient.shape)) == (torch.bfloat16, (4, 80, 64))
        else:
            assert type(of_matrices.grad_fn.next_functions[0][0]).__name__ == "AccumulateGrad"
    assert (biased.dtype, tuple(biased.shape), biased.device.type) == (torch.bfloat16, (96, 80), "cuda")
    (_, _, ends, *_), _ = calls.of(aten._grouped_mm)
    assert (ends.dtype, ends.device.type) == (torch.int32, "cuda")
    assert (aten.masked_fill.Scalar in {func for func, _, _ in calls.calls}) == (capability >= (10, 0))
    names = [str(func) for func, _, _ in calls.calls]
    assert not [name for name in names if "_local_scalar_dense" in name or "nonzero" in name]


@pytest.mark.parametrize("graded", [True, False])
def test_the_loss_of_an_output_layer_keeps_a_chunk_of_logits(graded: bool) -> None:
    if graded:
        skip_without_fake_sums()
    with FakeTensorMode(), Calls() as calls:
        hidden, weight = on_gpu(10_000, HIDDEN).requires_grad_(graded), on_gpu(ROWS, HIDDEN).requires_grad_(graded)
        labels, counts = torch.empty(10_000, device="cuda", dtype=torch.int64), on_gpu(10_000, dtype=torch.float32)
        loss = linear_cross_entropy(hidden, weight, labels, counts, Vocabulary(TRUE_ROWS))
        assert (tuple(loss.shape), loss.dtype, loss.device.type) == ((), torch.float32, "cuda")
        if graded:
            gradients = backward(loss, "_LinearCrossEntropyBackward", torch.empty((), device="cuda"))
            assert [(made.dtype, made.shape) for made in gradients] == [
                (torch.bfloat16, hidden.shape),
                (torch.bfloat16, weight.shape),
            ]
    made = [out for _, _, out in calls.calls if isinstance(out, torch.Tensor)]
    assert max(out.numel() for out in made) == 4096 * ROWS
    assert not [func for func, _, _ in calls.calls if "_local_scalar_dense" in str(func)], "nobody waits for the device"
    assert len([0 for func, _, _ in calls.calls if func is aten.addmm.dtype_out]) == 3 * graded


def output_layer(fused: bool) -> tuple[Readout, Any]:
    """megatron-core's layer of the padded vocabulary on a fake GPU, and what computes its loss."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig

    stand_in()
    alone: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=12,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=fused,
    )
    layer = ColumnParallelLinear(
        HIDDEN, ROWS, config=config, init_method=torch.nn.init.zeros_, bias=False, tp_group=alone
    ).cuda()
    readout = Readout(config, alone, TRUE_ROWS)
    readout.prepare(layer)
    return readout, layer


@pytest.mark.parametrize("fused", [False, True])
def test_the_padded_vocabulary_stays_in_the_products(fused: bool) -> None:
    """Rows of 50,257 numbers in 16 bits begin at odd addresses, which a GPU's matrix units do not take."""
    if fused:
        skip_without_fake_sums()
    with FakeTensorMode(), Calls() as calls:
        readout, layer = output_layer(fused)
        layer.weight.main_grad = on_gpu(ROWS, HIDDEN, dtype=torch.float32)
        hidden = on_gpu(1024, 4, HIDDEN).requires_grad_()
        labels = torch.empty(4, 1024, device="cuda", dtype=torch.int64)
        losses = readout(hidden, layer, None, labels)
        assert (tuple(losses.shape), losses.dtype) == ((4, 1024), torch.float32)
        name = "LinearWithGradAccumulationAndAsyncCommunicationBackward"
        gradients = backward(losses, name, on_gpu(1024, 4, ROWS))
    assert [tuple(made.shape) for made in gradients] == [(1024, 4, HIDDEN), (ROWS, HIDDEN)][: 1 + (not fused)]
    products = [
        (tuple(args[-2].shape), tuple(args[-1].shape)) if func is aten.mm.default else (ROWS, HIDDEN)
        for func, args, _ in calls.calls
        if func in (aten.mm.default, aten.addmm.dtype_out)
    ]
    forward, for_hidden = ((4096, HIDDEN), (HIDDEN, ROWS)), ((4096, ROWS), (ROWS, HIDDEN))
    for_weight = (ROWS, HIDDEN) if fused else ((ROWS, 4096), (4096, HIDDEN))
    assert products == [forward, for_hidden, for_weight]
    widths = {out.size(-1) for _, _, out in calls.calls if isinstance(out, torch.Tensor) and out.dim()}
    assert TRUE_ROWS not in widths, "nothing is cut"
