"""Names types of models that are not read, each with the computation that no model of ours does, and its line in
transformers 5.23.0."""

_WITHOUT_SCALE = "the logit_scale of its text model is left out of the logits"
_SELECTIVE_SCAN = "Mamba-1 decays each channel of a state by a matrix of its own, and Mamba-2 a head by one number"

_REASONS: dict[str, tuple[str, int]] = {
    "aya_vision": (_WITHOUT_SCALE, 390),
    "cohere2_vision": (_WITHOUT_SCALE, 334),
    "paligemma": (
        "every token of a prompt attends to all of it, later ones too, and attention here is causal",
        257,
    ),
    "axk2": ("queries and gates are made of the latents before and after their norm, which has gates itself", 589),
    "bailing_hybrid": (
        "the decay of its delta rule is a bounded sigmoid, and latent attention has gates",
        421,
    ),
    "cohere2_moe": ("experts read what attention reads, and what they give is averaged with the shared ones'", 192),
    "deepseek_v4": ("hyper-connections mix several residual streams", 887),
    "diffllama": ("attention is the difference of two softmaxes", 306),
    "dots3_note_text": ("layers with a window have latents and heads of other sizes", 99),
    "falcon_mamba": (_SELECTIVE_SCAN, 228),
    "gemma4_text": ("the last layers attend to keys and values of an earlier one, and heads have two sizes", 1569),
    "jamba": (_SELECTIVE_SCAN, 373),
    "jetmoe": ("queries of a token are made by experts", 462),
    "laguna": (
        "a softplus gates what attention gives, and layers have other numbers of heads",
        400,
    ),
    "longcat_flash": ("some experts compute nothing", 136),
    "mamba": (_SELECTIVE_SCAN, 213),
    "minimax": ("lightning attention takes the place of attention in some layers", 125),
    "zamba": ("one block of attention serves several layers", 738),
    "zamba2": ("one block of attention serves several layers", 1019),
}
_MODULES = {"dots3_note_text": "dots3_note", "gemma4_text": "gemma4"}


def _said(kind: str) -> str:
    words, line = _REASONS[kind]
    return f"{words} (transformers 5.23.0, modeling_{_MODULES.get(kind, kind)}.py, line {line})"


REFUSED: dict[str, str] = {kind: _said(kind) for kind in _REASONS}
"""Type -> why it is not read."""
