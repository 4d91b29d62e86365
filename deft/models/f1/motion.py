"""The motion prior: it predicts the next frame by warping the last one, from the actions and the state.

An untrained prior copies the last frame. The tokenizer's features of the warped frame give each code a prior logit,
−β‖z − e‖², where z is the residual after the coarser codes. The generation expert scales β by its confidence and adds
its own logits. Training first fits β for each scale (`fit_sharpness`). If most of an image is static, β is high, so
that the expert learns the moving parts and leaves the rest unchanged. Such images change strongly in few positions:
`motion_tail` gives the logits a heavy tail for these positions, which allows a higher β.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft.models.f1.config import F1Config
from deft.models.f1.heads import robot_features
from deft.models.f1.vq import MultiScaleQuantizer

PATCH = 4
NUM_BASIS = 6  # 1, x, y, x², xy, y²
START_SHARPNESS = 4.0
SHARPEST, SHARPEST_WITH_TAIL = 1e3, 1e6
TAIL = 1.5  # ν for recorded video of static cameras
START_MOVING = 4.0  # logit: at the start nearly all pixels move with the camera


class MotionPrior(nn.Module):
    """A motion field: a polynomial of the pixel position for the camera's motion, and a convolution for the rest."""

    def __init__(self, config: F1Config) -> None:
        super().__init__()
        channels, code_dim = config.motion_channels, config.tokenizer.code_dim
        inputs = config.n_obs_img_steps * config.max_action_dim + 1 + config.max_state_dim
        self.robot = nn.Sequential(nn.Linear(inputs, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU())
        self.camera = nn.Linear(128, 2 * NUM_BASIS)
        self.stem = nn.Conv2d(6 + 2, channels, PATCH, PATCH)  # the last two frames and the pixel position
        self.modulation = nn.Linear(128, 2 * channels)
        self.layers = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=dilation, dilation=dilation) for dilation in (1, 2, 4)
        )
        # motion in x and y, a correction of the three colours, and a mask of what moves with the camera (the gripper)
        self.head = nn.Conv2d(channels, 6, 1)
        self.embedding = nn.Linear(code_dim, config.generation.hidden_size)  # of the predicted residuals
        self.trust = nn.Linear(config.generation.hidden_size, 1)
        for layer in (self.camera, self.head, self.trust):
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)
        self.log_sharpness = nn.Parameter(torch.full((len(config.tokenizer.scales),), math.log(START_SHARPNESS)))
        self.tail = config.motion_tail

    def forward(self, frames: Tensor, actions: Tensor, known: Tensor, state: Tensor) -> Tensor:
        """Predict the next frame [B, 3, h, w] from the history [B, T, 3, h, w] in -1 … 1, actions and state."""
        last = frames[:, -1]
        batch, _, height, width = last.shape
        robot = self.robot(robot_features(actions, known, state))
        y = torch.linspace(-1, 1, height, device=last.device, dtype=last.dtype)
        x = torch.linspace(-1, 1, width, device=last.device, dtype=last.dtype)
        position = torch.stack(torch.meshgrid(x, y, indexing="xy"))  # [2, h, w]
        before = frames[:, -2] if frames.shape[1] > 1 else last
        stacked = torch.cat([last, before, position.expand(batch, -1, -1, -1)], 1)
        scale, shift = self.modulation(robot)[:, :, None, None].chunk(2, 1)
        hidden = functional.silu(self.stem(stacked) * (1 + scale) + shift)
        for layer in self.layers:
            hidden = hidden + functional.silu(layer(hidden))
        local = functional.interpolate(self.head(hidden), size=(height, width), mode="bilinear", align_corners=False)
        across, down = position
        basis = torch.stack([torch.ones_like(across), across, down, across**2, across * down, down**2])
        camera = torch.einsum("bck,khw->bchw", self.camera(robot).view(batch, 2, NUM_BASIS), basis)
        motion = camera * (1 - torch.sigmoid(local[:, 5:] - START_MOVING)) + local[:, :2]
        identity = torch.eye(2, 3, device=last.device, dtype=last.dtype).expand(batch, -1, -1)
        grid = functional.affine_grid(identity, list(last.shape), align_corners=False)
        moved = functional.grid_sample(
            last, grid + motion.permute(0, 2, 3, 1), padding_mode="border", align_corners=False
        )
        return moved + local[:, 2:5]

    def logits(self, residuals: Tensor, level: Tensor, output: Tensor, quantize: MultiScaleQuantizer) -> Tensor:
        """Return the prior logits of the codes for z [B, n, D] at scales `level` [n] (`prior_logits`).

        β depends on the scale and on the expert's output [B, n, C]. Its unit is the variance of the codes, so
        that values are comparable between tokenizers.
        """
        sharpness = (self.log_sharpness[level][:, None] + self.trust(output.float())).exp()
        return prior_logits(quantize.distances(residuals), sharpness / _spread(quantize), self.tail)


def prior_logits(distances: Tensor, sharpness: Tensor, tail: float = 0.0) -> Tensor:
    """−β d for d = ‖z − e_k‖² [B, n, K]; with a tail ν, −ν log(1 + β (d − min d) / ν), equal for small d.

    Distant codes then have p ~ d^−ν, which limits the loss at positions that changed.
    """
    if tail == 0.0:
        return -sharpness * distances
    excess = distances - distances.amin(-1, keepdim=True)
    return -tail * torch.log1p(sharpness / tail * excess)


@torch.no_grad()
def fit_sharpness(
    residuals: Tensor,
    codes: Tensor,
    quantize: MultiScaleQuantizer,
    sizes: list[int],
    total: Callable[[Tensor], Tensor],
    tail: float = 0.0,
) -> Tensor:
    """log β of each scale with the lowest cross-entropy of the prior alone, for z [B, L, D] and true codes [B, L].

    With d = ‖z − e‖² in units of the spread, dCE/dβ = d_true − Σ_k p_k d_k, which grows with β: its root, by bisection.
    With a tail, x = d − min d and g = x / (1 + β x / ν) replaces d. `total` sums over processes.
    """
    spread, found = _spread(quantize), []
    for z, true in zip(residuals.split(sizes, 1), codes.split(sizes, 1), strict=True):
        distances = quantize.distances(z.float()) / spread
        if tail:
            distances = distances - distances.amin(-1, keepdim=True)
        low = distances.new_tensor(math.log(START_SHARPNESS / 10))
        high = distances.new_tensor(math.log(SHARPEST_WITH_TAIL if tail else SHARPEST))
        for _ in range(16):
            middle = (low + high) / 2
            beta = middle.exp()
            slopes = distances / (1 + beta * distances / tail) if tail else distances
            chosen = slopes.gather(-1, true.unsqueeze(-1)).squeeze(-1)
            expected = (prior_logits(distances, beta, tail).softmax(-1) * slopes).sum(-1)
            rises = total((chosen - expected).sum()) > 0
            low, high = torch.where(rises, low, middle), torch.where(rises, middle, high)
        found.append((low + high) / 2)
    return torch.stack(found)


@torch.no_grad()
def prior_cross_entropy(
    residuals: Tensor,
    codes: Tensor,
    log_sharpness: Tensor,
    quantize: MultiScaleQuantizer,
    sizes: list[int],
    tail: float = 0.0,
) -> Tensor:
    """The cross-entropy [B] of the prior alone, mean over the codes, for z [B, L, D], true codes [B, L] and log β."""
    spread, losses = _spread(quantize), []
    for beta, z, true in zip(log_sharpness.exp(), residuals.split(sizes, 1), codes.split(sizes, 1), strict=True):
        logits = prior_logits(quantize.distances(z.float()), beta / spread, tail)
        losses.append(functional.cross_entropy(logits.transpose(1, 2), true, reduction="none"))
    return torch.cat(losses, 1).mean(1)


def _spread(quantize: MultiScaleQuantizer) -> Tensor:
    return quantize.embedding.weight.detach().var(0).sum().clamp(min=1e-8)
