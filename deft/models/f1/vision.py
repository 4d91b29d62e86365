"""SigLIP's vision tower and the projection of its features to word embeddings; `F1Model` applies it to every image.

Tensor names are those of transformers' SigLIP and PaliGemma, so that their weights can be loaded directly.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional

from deft.models.f1.config import VisionConfig

EPSILON = 1e-6


class VisionAttention(nn.Module):
    """Self-attention over the patches of an image."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[B, P, C], same out."""
        query, key, value = (
            projection(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class VisionLayer(nn.Module):
    """Attention and MLP, each after a layer norm and added to its input."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, EPSILON)
        self.self_attn = VisionAttention(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, EPSILON)
        fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self.mlp = nn.Sequential(OrderedDict(fc1=fc1, gelu=nn.GELU(approximate="tanh"), fc2=fc2))

    def forward(self, x: Tensor) -> Tensor:
        """[B, P, C], same out."""
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class PatchEmbeddings(nn.Module):
    """Embeds the patches of an image, with learned positions."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, config.hidden_size, config.patch_size, config.patch_size)
        self.position_embedding = nn.Embedding(config.num_tokens, config.hidden_size)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, h, w] → [B, P, C]."""
        return self.patch_embedding(images).flatten(2).transpose(1, 2) + self.position_embedding.weight


class VisionTower(nn.Module):
    """Maps images in -1 … 1 to features of the word embeddings' width."""

    def __init__(self, config: VisionConfig, out_size: int) -> None:
        super().__init__()
        self.embeddings = PatchEmbeddings(config)
        self.layers = nn.ModuleList(VisionLayer(config) for _ in range(config.num_layers))
        self.post_layernorm = nn.LayerNorm(config.hidden_size, EPSILON)
        self.projector = nn.Linear(config.hidden_size, out_size)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, h, w] → [B, P, out_size], at the scale of the words' embeddings.

        PaliGemma divides these features by √width and Gemma multiplies its inputs by √width; both are omitted here.
        """
        x = self.embeddings(images.to(self.projector.weight.dtype))
        for layer in self.layers:
            x = layer(x)
        return self.projector(self.post_layernorm(x))
