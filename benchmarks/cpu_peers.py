"""The programs that `cpu_speed.py` measures ours against: plain torch, transformers' Trainer, and nanoGPT.

Each takes the initial weights of ours and its batches, trains on them with the same AdamW, learning rates and clipping,
and takes a turn of steps whenever it is asked to.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from plain_gpt import PlainGPT, Recipe, Sizes, load_megatron_weights, make_optimizer, train_step
from torch import nn

Batches = list[tuple[torch.Tensor, torch.Tensor]]
"""Tokens and labels of each step, int64 [batch, sequence]; a label is the token that follows."""


@dataclass(frozen=True)
class Job:
    size: Any
    """`cpu_speed.Size`."""
    vocabulary: int
    recipe: Recipe
    weights: dict[str, torch.Tensor]
    """Ours, by global name."""
    batches: Batches
    turns: Any
    """`cpu_speed.Turns`."""
    fused: bool | None
    compiled: bool


def run_plain(job: Job) -> None:
    """Train the model of `plain_gpt.py`."""
    size = job.size
    sizes = Sizes(size.layers, size.hidden, size.heads, size.ffn, job.vocabulary, size.sequence)
    plain = PlainGPT(sizes)
    load_megatron_weights(plain, job.weights, sizes)
    if job.compiled:
        plain.compile()
    optimizer = make_optimizer(plain, job.recipe, job.fused)
    for step, (tokens, labels) in enumerate(job.batches):
        job.turns.before_step()
        job.turns.after_step(train_step(plain, optimizer, job.recipe, step, tokens, labels))


def run_nanogpt(job: Job, folder: str) -> None:
    """Train nanoGPT's model as its train.py does on a CPU: fp32, no gradient accumulation, no dropout; biases as in
    GPT-2."""
    sys.path.insert(0, folder)
    from model import GPT, GPTConfig  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    size, recipe = job.size, job.recipe
    shape = {"n_layer": size.layers, "n_head": size.heads, "n_embd": size.hidden, "block_size": size.sequence}
    model: Any = GPT(GPTConfig(**shape, vocab_size=job.vocabulary, dropout=0.0, bias=True))
    model.load_state_dict(_nanogpt_weights(job))
    optimizer = model.configure_optimizers(recipe.weight_decay, recipe.peak, (0.9, recipe.beta2), "cpu")
    if job.compiled:
        model = torch.compile(model)
    for step, (tokens, labels) in enumerate(job.batches):
        job.turns.before_step()
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate(step)
        _, loss = model(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        job.turns.after_step(loss.item())


def _nanogpt_weights(job: Job) -> dict[str, torch.Tensor]:
    """Return ours by nanoGPT's names. Of each head ours has query, key and value together; nanoGPT has all heads'
    queries, then keys, then values."""
    embedding = job.weights["embedding.word_embeddings.weight"][: job.vocabulary]
    state = {
        "transformer.wte.weight": embedding,
        "lm_head.weight": embedding,
        "transformer.wpe.weight": job.weights["embedding.position_embeddings.weight"],
    }
    heads = job.size.heads
    modules = {
        "ln_1": "input_layernorm",
        "attn.c_attn": "self_attention.linear_qkv",
        "attn.c_proj": "self_attention.linear_proj",
        "ln_2": "pre_mlp_layernorm",
        "mlp.c_fc": "mlp.linear_fc1",
        "mlp.c_proj": "mlp.linear_fc2",
    }
    for kind in ("weight", "bias"):
        state[f"transformer.ln_f.{kind}"] = job.weights[f"decoder.final_layernorm.{kind}"]
        for layer in range(job.size.layers):
            for theirs, ours in modules.items():
                tensor = job.weights[f"decoder.layers.{layer}.{ours}.{kind}"]
                if theirs == "attn.c_attn":
                    tensor = tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
                state[f"transformer.h.{layer}.{theirs}.{kind}"] = tensor
    return state


def run_trainer(job: Job) -> None:
    """Train transformers' Llama under its Trainer, with the optimizer and the learning rates of the others."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    size, recipe, turns = job.size, job.recipe, job.turns
    config = LlamaConfig(
        vocab_size=job.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=size.sequence,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(_llama_weights(job))

    class Samples(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            for tokens, labels in job.batches:
                for row in zip(tokens, labels, strict=True):
                    yield dict(zip(("input_ids", "labels"), row, strict=True))

    class InTurns(Trainer):
        def training_step(self, *arguments: Any, **settings: Any) -> torch.Tensor:
            turns.before_step()
            self.last = super().training_step(*arguments, **settings)
            return self.last

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:  # pyright: ignore
            labels = inputs["labels"]
            return model(input_ids=inputs["input_ids"], labels=labels, shift_labels=labels).loss

    from transformers import TrainerCallback

    class AfterStep(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.after_step(trainer.last.item())

    optimizer = make_optimizer(model, recipe, job.fused)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: recipe.learning_rate(step) / recipe.peak)
    settings = TrainingArguments(
        output_dir="unused",
        max_steps=len(job.batches),
        per_device_train_batch_size=size.batch,
        max_grad_norm=recipe.clip,
        use_cpu=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = InTurns(
        model=model, args=settings, train_dataset=Samples(), optimizers=(optimizer, rates), callbacks=[AfterStep()]
    )
    trainer.train()


def _llama_weights(job: Job) -> dict[str, torch.Tensor]:
    embedding = job.weights["embedding.word_embeddings.weight"][: job.vocabulary]
    state = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding,
        "model.norm.weight": job.weights["decoder.final_layernorm.weight"],
    }
    for layer in range(job.size.layers):
        ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
        qkv = job.weights[f"{ours}.self_attention.linear_qkv.weight"].unflatten(0, (job.size.heads, 3, -1))
        gate, up = job.weights[f"{ours}.mlp.linear_fc1.weight"].chunk(2)
        state |= {
            f"{theirs}.input_layernorm.weight": job.weights[f"{ours}.input_layernorm.weight"],
            f"{theirs}.self_attn.q_proj.weight": qkv[:, 0].flatten(0, 1),
            f"{theirs}.self_attn.k_proj.weight": qkv[:, 1].flatten(0, 1),
            f"{theirs}.self_attn.v_proj.weight": qkv[:, 2].flatten(0, 1),
            f"{theirs}.self_attn.o_proj.weight": job.weights[f"{ours}.self_attention.linear_proj.weight"],
            f"{theirs}.post_attention_layernorm.weight": job.weights[f"{ours}.pre_mlp_layernorm.weight"],
            f"{theirs}.mlp.gate_proj.weight": gate,
            f"{theirs}.mlp.up_proj.weight": up,
            f"{theirs}.mlp.down_proj.weight": job.weights[f"{ours}.mlp.linear_fc2.weight"],
        }
    return state
