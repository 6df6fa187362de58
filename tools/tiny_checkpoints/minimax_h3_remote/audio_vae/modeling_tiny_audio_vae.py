"""Stand-in for MiniMax-H3's audio VAE: 800 samples a latent frame (40 Hz at 32 kHz), random weights."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

CHANNELS = 32
HOP = 800
SEED = 2


class Model(nn.Module):
    """The network, with the attributes that vLLM-Omni's adapter reads."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv1d(1, CHANNELS, HOP, stride=HOP)
        self.pre_block = nn.Identity()
        self.mean_proj = nn.Conv1d(CHANNELS, CHANNELS, 1)
        self.decoder = nn.ConvTranspose1d(CHANNELS, 1, HOP, stride=HOP)

    def preprocess(self, waveform: torch.Tensor, sample_rate: int) -> torch.Tensor:
        """[batch, 1, samples], filled up to whole latent frames."""
        return F.pad(waveform, (0, -waveform.shape[-1] % HOP))


class TinyVAE(nn.Module):
    """The remote class that the checkpoint's `auto_map` names."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    @classmethod
    def from_pretrained(cls, path: str | Path) -> TinyVAE:
        """Return the VAE with weights that depend on the seed alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return cls(Model())

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """[batch, CHANNELS, frames] to [batch, 1, HOP * frames], in [-1, 1]."""
        return self.model.decoder(z).tanh()
