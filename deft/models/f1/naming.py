"""Maps our tensor names to those of the published checkpoint and of PaliGemma."""

from __future__ import annotations

from collections.abc import Iterable

# Our prefixes → published prefixes; the first match is used.
_PALIGEMMA = "model.paligemma_with_expert.paligemma."
_PREFIXES = {
    "tokenizer.": "vae.",
    "model.vision.embeddings.": f"{_PALIGEMMA}vision_tower.vision_model.embeddings.",
    "model.vision.layers.": f"{_PALIGEMMA}vision_tower.vision_model.encoder.layers.",
    "model.vision.post_layernorm.": f"{_PALIGEMMA}vision_tower.vision_model.post_layernorm.",
    "model.vision.projector.": f"{_PALIGEMMA}multi_modal_projector.linear.",
    "model.words.": f"{_PALIGEMMA}language_model.model.embed_tokens.",
    "model.experts.understanding.": f"{_PALIGEMMA}language_model.model.",
    "model.experts.generation.": "model.paligemma_with_expert.gemma_wm_expert.model.",
    "model.experts.action.": "model.paligemma_with_expert.gemma_expert.model.",
    "model.language_heads.understanding.": f"{_PALIGEMMA}language_model.lm_head.",
    "model.language_heads.generation.": "model.paligemma_with_expert.gemma_wm_expert.lm_head.",
    "model.language_heads.action.": "model.paligemma_with_expert.gemma_expert.lm_head.",
    "model.world_model.temporal.": "model.temporal_conv.conv.",
    "model.world_model.history_positions": "model.wm_hist_pos_embs",
    "model.world_model.embedding.": "model.wm_embeddings.",
    "model.world_model.start": "model.wm_sos_token_embs",
    "model.world_model.condition_positions": "model.wm_cond_pos_embs",
    "model.world_model.output_positions": "model.wm_output_position_embedding",
    "model.world_model.level_embedding.": "model.lvl_embed.",
    "model.world_model.level": "model.lvl_1L",
    "model.world_model.mask_embedding": "model.mask_embedding",
    "model.world_model.norm.": "model.wm_out_layer_norm.",
    "model.world_model.output.": "model.wm_out_proj.",
    "model.flow.": "model.",
}
OWN_PREFIXES = ("model.memory.", "model.conditioning.", "model.motion.")
"""Parts that the published model lacks; they are initialised without effect."""
REPEATED = "model.vae."
"""The published file may hold the tokenizer a second time under this name."""


def published_name(name: str) -> str | None:
    """Return the published name of one of our tensors; None if the published model lacks it."""
    if name.startswith(OWN_PREFIXES):
        return None
    for ours, theirs in _PREFIXES.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    raise KeyError(name)


# PaliGemma's own names, of all its releases → ours, once `model.` and repeated parts are taken off.
_PALIGEMMA_PARTS = {
    "vision_tower.embeddings.": "vision.embeddings.",
    "vision_tower.encoder.layers.": "vision.layers.",
    "vision_tower.post_layernorm.": "vision.post_layernorm.",
    "multi_modal_projector.linear.": "vision.projector.",
    "language_model.embed_tokens.": "words.",
    "language_model.layers.": "experts.understanding.layers.",
    "language_model.norm.": "experts.understanding.norm.",
}


def from_paligemma(name: str) -> str | None:
    """Return our name, within the model, of a tensor of a PaliGemma file; None for its unused output layer."""
    plain = name.removeprefix("model.")
    plain = plain.replace("language_model.model.", "language_model.").replace("vision_model.", "")
    if "lm_head." in plain:
        return None
    for theirs, ours in _PALIGEMMA_PARTS.items():
        if plain.startswith(theirs):
            return ours + plain.removeprefix(theirs)
    return name


def is_published(names: Iterable[str]) -> bool:
    """Whether a file's names are in the published layout."""
    return any(name.startswith(("vae.", "model.paligemma_with_expert.")) for name in names)
