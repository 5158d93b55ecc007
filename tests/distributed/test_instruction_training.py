"""Fine-tuning from a Hugging Face model on conversations: a loop of transformers, one process, and every layout."""

import shlex
from typing import Any, NamedTuple

import pytest

from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.plugins.prepare.chat_templates import TEMPLATES
from megatron_ext.plugins.prepare.commands.preprocess_data import main as preprocess
from megatron_ext.plugins.prove.parity import CURVE_TOLERANCE, FIRST_LOSS_TOLERANCE, compare
from megatron_ext.plugins.prove.recorded_training import RunRecord, record
from tests.support.hf_models import quiet_transformers, write_model
from tests.support.instructions import conversations, write_lines, write_tokenizer
from tests.support.plain_process import in_plain_process

# Of the second tier: tests/plugins/prepare encodes conversations.
pytestmark = pytest.mark.full

quiet_transformers()

STEPS = 4
BATCH = 8
SEQ_LENGTH = 128
RECIPE = shlex.split(f"""
    --seq-length {SEQ_LENGTH} --micro-batch-size 2 --global-batch-size {BATCH} --train-iters 20 --lr 1e-3
    --lr-decay-style constant --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --attention-dropout 0
    --hidden-dropout 0 --make-vocab-size-divisible-by 16 --reset-position-ids --reset-attention-mask
    --assistant-only-loss --data-order formula --full-validation --eval-interval 100
""")
LAYOUTS = {
    "TP2 x DP2": (4, "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "CP2": (2, "--context-parallel-size 2 --cp-comm-type all_gather"),
}


class Prepared(NamedTuple):
    model: str
    tokenizer: str
    flags: list[str]
    messages: list[list[dict[str, str]]]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """A tiny model, its tokenizer, and conversations packed to the sequence."""
    folder = tmp_path_factory.mktemp("instruct")
    tokenizer = write_tokenizer(folder / "tokenizer")
    write_model(folder / "model", "Llama 2", vocab_size=303, num_hidden_layers=2)
    messages = conversations(260)
    named = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tokenizer]
    paths = []
    for split, part in (("train", messages[:200]), ("valid", messages[200:])):
        lines = write_lines(folder / f"{split}.jsonl", [{"messages": one} for one in part])
        prefix = str(folder / split)
        packing = ["--seq-length", str(SEQ_LENGTH), "--on-error", "skip", "--data-format", "messages"]
        assert preprocess(["--input", lines, "--output-prefix", prefix, *packing, *named]) == 0
        paths += [f"--{split}-data-path", f"{prefix}_messages_document"]
    flags = [*RECIPE, "--load-hf", str(folder / "model"), *named, *paths, "--data-cache-path", str(folder / "cache")]
    return Prepared(str(folder / "model"), tokenizer, flags, messages)


@pytest.fixture(scope="module")
def alone(prepared: Prepared) -> RunRecord:
    return record(prepared.flags, 1, STEPS)


# CP2 is slow: test_context_parallel.py has loss masks and packed documents.
@pytest.mark.parametrize("layout", ["TP2 x DP2", "PP2", pytest.param("CP2", marks=pytest.mark.slow)])
def test_every_layout_is_one_process(layout: str, prepared: Prepared, alone: RunRecord) -> None:
    ranks, flags = LAYOUTS[layout]
    assert compare(alone, record([*prepared.flags, *flags.split()], ranks, STEPS)).problems() == []


def test_one_process_is_a_plain_loop_of_transformers(prepared: Prepared, alone: RunRecord) -> None:
    [samples] = run_ranks(1, our_samples, prepared.flags)
    losses, norms = in_plain_process(their_training, prepared.model, prepared.tokenizer, prepared.messages, samples)
    assert losses[-1] < losses[0] - 0.3, "it learns"
    assert abs(losses[0] - alone.losses[0]) <= FIRST_LOSS_TOLERANCE * losses[0]
    for ours, theirs in ((alone.losses, losses), (alone.grad_norms, norms)):
        assert ours == pytest.approx(theirs, rel=2 * CURVE_TOLERANCE)
    everything = record([flag for flag in prepared.flags if flag != "--assistant-only-loss"], 1, 1)
    assert abs(everything.losses[0] - losses[0]) > 1e-2, "the mask makes a difference"


def our_samples(flags: list[str]) -> list[list[list[int]]]:
    """The documents of every sample of the first steps, by their ids; what fills a sample up is one of them."""
    from megatron_ext import device
    from megatron_ext.train.configure import configure

    device.install("cpu")
    from megatron_ext.train.datasets import datasets_of_run, tokenizer_of_run

    config = configure(flags).config
    train: Any = datasets_of_run(config, tokenizer_of_run(config)).train
    samples = []
    for index in range(STEPS * BATCH):
        sample, documents = train[index], []
        for token, begins in zip(sample["tokens"].tolist(), sample["document_begins"], strict=True):
            if begins:
                documents.append([])
            documents[-1].append(token)
        samples.append(documents)
    return samples


def their_training(
    model_folder: str, tokenizer_folder: str, messages: list[Any], samples: list[list[list[int]]]
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a loop that takes each conversation for itself, with transformers' ids and masks."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_folder)
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager")
    masks = {}
    for one in messages:
        encoded = tokenizer.apply_chat_template(
            one, chat_template=TEMPLATES["chatml"], return_dict=True, return_assistant_tokens_mask=True
        )
        masks[tuple(encoded["input_ids"])] = encoded["assistant_masks"]
    decayed = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step in range(STEPS):
        known = [
            document
            for sample in samples[step * BATCH : (step + 1) * BATCH]
            for document in sample
            if tuple(document) in masks
        ]
        assert len(known) > BATCH
        total, count = torch.zeros(()), 0
        for document in known:
            ids, mask = torch.tensor([document]), torch.tensor(masks[tuple(document)], dtype=torch.bool)
            labels = torch.where(mask, ids[0], -100)[1:]
            logits = model(input_ids=ids).logits[0, :-1]
            total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
            count += int((labels != -100).sum())
        optimizer.zero_grad()
        (total / count).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(float(total / count))
    return losses, norms
