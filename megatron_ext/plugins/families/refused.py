"""Names types of models that are not read, each with the computation that no model of ours does, and its line in
transformers 5.23.0."""

_WITHOUT_SCALE = "the logit_scale of its text model is left out of the logits"

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
    "deepseek_v4": ("hyper-connections mix several residual streams", 887),
    "diffllama": ("attention is the difference of two softmaxes", 306),
    "dots3_note_text": ("layers with a window have latents and heads of other sizes", 99),
    "gemma4_text": ("the last layers attend to keys and values of an earlier one, and heads have two sizes", 1569),
    "jetmoe": ("queries of a token are made by experts", 462),
    "laguna": (
        "a softplus gates what attention gives, and layers have other numbers of heads",
        400,
    ),
    "longcat_flash": ("some experts compute nothing", 136),
    "minimax": ("lightning attention takes the place of attention in some layers", 125),
    "bitnet": (
        "what attention gives is normalized before its output projection, and an MLP's inside before its second matrix",
        215,
    ),
    "ctrl": ("positions are sines and cosines that nobody learns", 58),
    "dbrx": ("the rope_theta of attn_config, which its files have, is not the base of its rotation", 184),
    "doge": ("a mask is computed from values, and residual streams have weights", 325),
    "gemma3n_text": ("several residual streams are predicted and corrected", 987),
    "gpt_neox_japanese": ("the last layer alone has a bias of attention's output", 159),
    "hrm_text": ("two stacks of layers are run in turn, several times", 405),
    "hy_v4": ("hyper-connections mix several residual streams", 602),
    "inkling_text": ("scores have terms that are learned for each distance", 121),
    "lfm3": ("layers without a window rotate the fastest pairs of channels alone (rope_type proportional)", 79),
    "modernbert-decoder": (
        "the first layer has no norm before its attention, and a matrix stands before the output layer",
        298,
    ),
    "openai-gpt": ("sums of the residual stream are normalized themselves", 148),
    "recurrent_gemma": ("a gated linear recurrence takes the place of attention in some layers", 280),
    "rwkv": ("a recurrence takes the place of attention", 206),
    "xglm": ("positions are sines and cosines that nobody learns", 53),
    "xlstm": ("a recurrence takes the place of attention", 39),
    "zaya": ("queries, keys and values are convolved, and an MLP routes to experts", 143),
    "zamba": ("one block of attention serves several layers", 738),
    "zamba2": ("one block of attention serves several layers", 1019),
}
_MODULES = {
    "gemma3n_text": "gemma3n",
    "inkling_text": "inkling",
    "modernbert-decoder": "modernbert_decoder",
    "openai-gpt": "openai",
    "dots3_note_text": "dots3_note",
    "gemma4_text": "gemma4",
}


def _said(kind: str) -> str:
    words, line = _REASONS[kind]
    return f"{words} (transformers 5.23.0, modeling_{_MODULES.get(kind, kind)}.py, line {line})"


REFUSED: dict[str, str] = {kind: _said(kind) for kind in _REASONS}
"""Type -> why it is not read."""
