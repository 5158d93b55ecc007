"""Lists the layouts that are compared with one process, and the models that they are compared on.

    case = CASES["TP2 SP, tied"]
    case.flags                       # ("--tensor-model-parallel-size", "2", "--sequence-parallel")

Every case starts from the same seed and no checkpoint.
"""

from dataclasses import dataclass, replace

from megatron_ext.plugins.prove import compared_layouts as layouts
from megatron_ext.plugins.prove import compared_parts as parts
from megatron_ext.plugins.prove.compared_models import MODELS
from megatron_ext.registry import brought


@dataclass(frozen=True)
class Case:
    """One layout of one model, to be compared with one process."""

    name: str
    model: str
    """Key of MODELS."""

    world_size: int
    flags: tuple[str, ...]
    """Flags in which the layout differs from the one process."""

    slow: bool = False
    """Whether the case is left to docs/parity.md and to `bash tests/run.sh --all`."""

    slow_in_bf16: bool = False
    """Whether the case in bf16 is left to docs/parity.md and to `bash tests/run.sh --all`, but not the case in fp32."""


def _cases() -> list[Case]:
    cases = []
    for layout, (world_size, flags) in layouts.LAYOUTS.items():
        depth = "8 layers, " if layout == "PP4 VPP2" else ""
        for model in ("tied", "untied"):
            cases.append(Case(f"{layout}, {model}", f"{depth}{model}", world_size, tuple(flags.split())))
    for layout, (world_size, flags) in {**layouts.UNEVEN, **layouts.SHARDED}.items():
        for model in ("tied", "untied"):
            name = f"{layout}, {model}"
            cases.append(
                Case(name, model, world_size, tuple(flags.split()), slow=name not in layouts.QUICK, slow_in_bf16=True)
            )
    for layout, (world_size, flags) in parts.EXPERT_LAYOUTS.items():
        name, slow = f"{layout}, experts", layout not in parts.QUICK_EXPERTS
        cases.append(Case(name, "experts", world_size, tuple(flags.split()), slow=slow, slow_in_bf16=True))
    routed = [("routing by groups", one) for one in parts.ROUTING]
    routed += [("routing with two losses", one) for one in parts.TWICE]
    routed += [("experts in a latent width", one) for one in parts.TWICE if one != "EP4"]
    for model, layout in routed:
        (world_size, flags), slow = parts.ROUTING[layout], layout not in parts.QUICK_ROUTING
        cases.append(Case(f"{layout}, {model}", model, world_size, tuple(flags.split()), slow, slow_in_bf16=True))
    # Biases and learned positions under sequence parallelism, and tied embeddings across a divided vocabulary.
    flags = f"{layouts.TP2_SP} --pipeline-model-parallel-size 2"
    for model in ("learned positions, biases", "query and key norm, QKV bias"):
        cases.append(Case(f"TP2 SP PP2, {model}", model, 4, tuple(flags.split())))
    for name, (world_size, words) in layouts.CONTEXT.items():
        slow = name not in layouts.QUICK
        case = Case(name, _model(name), world_size, tuple(words.split()), slow, slow_in_bf16=slow or "CP4" not in name)
        cases.append(case)
    for layout, (world_size, flags) in parts.OLMO2.items():
        slow = layout not in parts.QUICK_OLMO2
        cases.append(
            Case(f"{layout}, OLMo-2", "OLMo-2", world_size, tuple(flags.split()), slow, slow or layout == "TP4")
        )
    quick = parts.QUICK_WINDOWS | parts.QUICK_LATENTS | parts.QUICK_DELTA | parts.QUICK_AHEAD
    quick |= parts.QUICK_MAMBA | layouts.QUICK_SCHEDULES | parts.QUICK_INDEXED
    others = parts.WINDOWS | parts.LATENTS | parts.INDEXED | parts.DELTA | parts.MAMBA | parts.AHEAD
    others |= layouts.SCHEDULES
    for compared in brought("comparisons"):
        others |= compared.layouts
        quick |= {*compared.quick}
    for name, (world_size, flags) in others.items():
        cases.append(Case(name, _model(name), world_size, tuple(flags.split()), name not in quick, slow_in_bf16=True))
    for name, (world_size, flags) in parts.PIECES.items():
        slow = "PP2" not in name and name not in parts.QUICK_PIECES
        cases.append(Case(name, _model(name), world_size, tuple(flags.split()), slow, slow_in_bf16=True))
    for case in [case for case in cases if case.name in layouts.MUON_CASES]:
        slow, name, model = case.name not in layouts.QUICK_MUON, f"{case.name}, Muon", f"{case.model}, Muon"
        cases.append(replace(case, name=name, model=model, slow=slow, slow_in_bf16=True))
    updates = ("muP", "AdEMAMix", "schedule-free", "AdaptiveMuon", "NorMuon", "Adafactor")
    for model in (f"untied, {update}" for update in updates):
        for layout in layouts.UPDATES:
            case = next(one for one in cases if one.name == f"{layout}, untied")
            slow, name = layout not in layouts.QUICK_UPDATES, f"{layout}, {model}"
            cases.append(replace(case, name=name, model=model, slow=slow, slow_in_bf16=True))
    for case in [case for case in cases if case.name in layouts.ADAFACTOR_OF_EXPERTS]:
        model = f"{case.model}, Adafactor"
        cases.append(replace(case, name=f"{case.name}, Adafactor", model=model, slow=True, slow_in_bf16=True))
    for mode, flags in layouts.RECOMPUTE.items():
        cases.append(Case(f"one process, recompute {mode}", "untied", 1, tuple(flags.split())))
    return cases


def _model(name: str) -> str:
    """Return the model that a case's name ends with."""
    return max((model for model in MODELS if name.endswith(f", {model}")), key=len)


CASES = {case.name: case for case in _cases()}
