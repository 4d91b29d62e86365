"""Settings of `deft serve` and `deft export`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from deft.config.groups import SeedSettings
from deft.config.validation import (
    Count,
    NonNegative,
    NonNegativeInt,
    Number,
    OutputPath,
    Port,
    Positive,
    Switch,
    settings,
)


@settings
class ServeConfig(SeedSettings):
    """Serve the policy of a run to robots, over WebSocket and HTTP, until Ctrl-C or SIGTERM."""

    path: str
    """Run directory (its best or latest checkpoint), checkpoint, or folder of `deft export`."""
    mode: Literal["action", "chunk", "ensemble", "async", "rtc"] = "action"
    """Answer with the next action of the chunk, the whole chunk, the weighted mean of the chunks that cover the step
    (temporal ensembling), or the next action while the next chunk is computed (asynchronous inference; `rtc` denoises
    it so that it continues the last one)."""
    ensemble_decay: NonNegative = 0.01
    """Temporal ensembling: m in the weights exp(-m i) of the chunks, i = 0 for the oldest."""
    execution_horizon: Count | None = None
    """`async` and `rtc`: start to compute the next chunk after this many steps of the last one; by default half of the
    chunk."""
    blend_steps: NonNegativeInt = 0
    """`async` and `rtc`: steps over which actions change from the last chunk to the next one."""
    inference_delay: Count = 1
    """`rtc`: steps that the first computation of a chunk is expected to take; then the longest of the last ten."""
    max_guidance: NonNegative = 5.0
    """`rtc`: largest factor of the guidance towards the last chunk in a denoising step."""
    host: str = "127.0.0.1"
    """Address to listen on. The server has no password and no encryption: other addresses than 127.0.0.1 are for a
    network whose machines you all trust."""
    port: Port = 6080
    """Port; 0: any free port."""
    deterministic: Switch = True
    """Answer with the most likely actions; `--stochastic` samples actions as in training."""
    target_return: Number | None = None
    """Return that a Decision Transformer aims at; by default that of its run."""
    threads: Count | None = None
    """CPU threads of PyTorch; by default PyTorch's own choice."""
    max_clients: Count = 8
    """Connections at the same time; further ones are rejected."""
    max_message_mib: Positive = 8.0
    """Largest message in MiB; a larger one closes its connection."""
    log_interval: NonNegative = 60.0
    """Log latencies every this many seconds in which messages were answered; 0: only at the end."""
    seed = Field(0, description="Seed of sampled actions.")


@settings
class ExportConfig:
    """Write the policy of a run for other programs."""

    path: str
    """Run directory (its best or latest checkpoint) or checkpoint."""
    format: Literal["safetensors", "torch-export", "onnx"] = "safetensors"
    """Weights with settings and spaces, a program of torch.export, or an ONNX model (extra `export`)."""
    out: OutputPath | None = None
    """Folder to write; by default the name of the run and the format, in the current directory."""
