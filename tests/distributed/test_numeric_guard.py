"""A NaN on one rank: no update anywhere, and every rank names rank, iteration and parameter."""

import hashlib
from typing import Any

import pytest

from megatron_ext.verify.ranks import run_ranks

FLAGS = (
    "--device cpu --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 8 --train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 60 "
    "--eval-iters 0 --make-vocab-size-divisible-by 8 "
)
LAYOUTS = {
    "data parallel": (2, ""),
    "distributed optimizer, overlapped": (
        2,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000",
    ),
    "FSDP2": (2, "--use-torch-fsdp2"),
    "ZeRO-3": (2, "--use-megatron-fsdp"),
    "ZeRO-2, several microbatches": (
        2,
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --bf16",
    ),
    "tensor parallel": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "3D": (
        8,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--use-distributed-optimizer --bf16",
    ),
}


def _train(flags: str, bad_rank: int, what: str) -> tuple[str, str, str, int]:
    """Two good steps, then one that is bad on one rank. Returns its error, weight hashes around it, the iteration."""
    import torch

    from megatron_ext import device
    from megatron_ext.errors import NumericError
    from megatron_ext.model.names import global_named_parameters
    from megatron_ext.parallel.rows import local_part
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer

    run = build_run(configure((FLAGS + flags).split()).config, device.install("cpu"))

    def weights() -> str:
        with run.gathered_parameters():
            parts = [local_part(parameter) for _, parameter in global_named_parameters(run.chunks)]
            data = b"".join(part.float().numpy().tobytes() for part in parts)
        return hashlib.sha256(data).hexdigest()

    trainer = Trainer(run, [])
    trainer.step()
    trainer.step()
    if run.rank == bad_rank:
        _poison(run, what)
    before = weights()
    with pytest.raises(NumericError) as raised:
        trainer.step()
    assert isinstance(torch.distributed.get_world_size(), int)
    return str(raised.value), before, weights(), run.state.iteration


def _poison(run: Any, what: str) -> None:
    from megatron_ext.model.names import global_named_parameters, unwrapped

    if what == "loss":
        run.chunks[-1].module.register_forward_hook(lambda module, inputs, output: output * float("nan"))
        return
    name, parameter = next(named for named in global_named_parameters(run.chunks) if named[0].endswith(what))
    if run.config.layout.use_torch_fsdp2 or run.config.layout.use_megatron_fsdp:
        # The gradient goes to the gathered weight, which the module has inside of its forward pass.
        module = unwrapped(run.chunks)[0].get_submodule(name.removesuffix(".weight"))

        def poison(module: Any, _inputs: Any) -> None:
            module.weight.register_hook(lambda gradient: gradient * float("inf"))

        module.register_forward_pre_hook(poison)
        return
    parameter.register_hook(lambda gradient: gradient * float("inf"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_bad_gradient_on_one_rank_is_named(name: str) -> None:
    world_size, flags = LAYOUTS[name]
    parameter = "mlp.linear_fc1.weight"
    results = run_ranks(world_size, _train, flags, 1, parameter)
    for error, before, after, iteration in results:
        assert error.startswith("rank 1: ")
        assert f".{parameter}, iteration 3 " in error
        assert "infinite values in the gradient of decoder.layers." in error
        assert before == after, "a weight was changed"
        assert iteration == 2
    assert len({error for error, *_ in results}) == 1, "ranks tell different causes"


def test_a_bad_loss_on_one_rank_is_named() -> None:
    for error, before, after, _ in run_ranks(2, _train, "", 1, "loss"):
        assert error.startswith("rank 1: NaN or infinity in the loss, iteration 3 ")
        assert before == after


def _train_unchecked(flags: str) -> tuple[int, float]:
    from megatron_ext import device
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer

    run = build_run(configure((FLAGS + flags).split()).config, device.install("cpu"))
    trainer = Trainer(run, [])
    trainer.step()
    _poison(run, "loss")
    loss = trainer.step().loss
    return run.state.interval_nan, loss


def test_without_the_check_the_run_goes_on_and_counts() -> None:
    [(nans, loss)] = run_ranks(1, _train_unchecked, "--no-check-for-nan-in-loss-and-grad")
    assert nans == 1
    assert loss != loss
