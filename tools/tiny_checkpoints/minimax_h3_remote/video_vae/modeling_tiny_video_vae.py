"""Stand-in for MiniMax-H3's video VAE: 16x in space, 4x in time, a transformer decoder, random weights.

It has the names that vLLM-Omni reaches for (`model.encoder`, `model.decoder.transformer_blocks`, `decode_base`,
`encode_images`, `encode_videos`, ...) and, like the real one, works on a video clip by clip.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .parallel import get_parallel_state  # noqa: F401  vLLM-Omni looks for the module beside this one

CHANNELS = 24
WIDTH = 64
HEAD_WIDTH = 32
BLOCKS = 2
SPACE = 16
TIME = 4
# A clip of 5 latent frames is 17 frames of video, and the 2 latent frames at the end are 5: 5 n + 2 make 17 n + 5.
CLIP_LATENT_FRAMES = 5
CLIP_FRAMES = 1 + TIME * (CLIP_LATENT_FRAMES - 1)
SEED = 1


class Attention(nn.Module):
    """Self-attention with normalised query and key."""

    def __init__(self) -> None:
        super().__init__()
        self.dim_head = HEAD_WIDTH
        self.spatial_parallel = False
        self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.to_out = nn.Linear(WIDTH, WIDTH)
        self.norm_q = nn.RMSNorm(HEAD_WIDTH, elementwise_affine=False, eps=1e-6)
        self.norm_k = nn.RMSNorm(HEAD_WIDTH, elementwise_affine=False, eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, width = x.shape
        q, k, v = self.to_qkv(x).view(batch, rows, 3, width // HEAD_WIDTH, HEAD_WIDTH).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(self.norm_q(q), self.norm_k(k), v)
        return self.to_out(out.transpose(1, 2).reshape(batch, rows, width))


class FeedForward(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.use_gated = True
        self.act_fn = nn.SiLU()
        self.w1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.w1(x).chunk(2, -1)
        return self.w2(self.act_fn(gate) * up)


class Block(nn.Module):
    """Pre-norm transformer block with a learned scale on each residual."""

    def __init__(self) -> None:
        super().__init__()
        self.use_scale = True
        self.norm1 = nn.RMSNorm(WIDTH)
        self.norm2 = nn.RMSNorm(WIDTH)
        self.attn = Attention()
        self.ff = FeedForward()
        self.scale1 = nn.Parameter(torch.ones(WIDTH))
        self.scale2 = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x)) * self.scale1
        return x + self.ff(self.norm2(x)) * self.scale2


class Decoder(nn.Module):
    """[batch, CHANNELS, t, h, w] to [batch, 3, TIME * t, SPACE * h, SPACE * w]."""

    def __init__(self) -> None:
        super().__init__()
        self.proj_in = nn.Linear(CHANNELS, WIDTH)
        self.transformer_blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.proj_out = nn.Linear(WIDTH, 3 * TIME * SPACE * SPACE)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        b, c, t, h, w = z.shape
        x = self.proj_in(z.permute(0, 2, 3, 4, 1).reshape(b, t * h * w, c))
        for block in self.transformer_blocks:
            x = block(x)
        x = self.proj_out(x).view(b, t, h, w, 3, TIME, SPACE, SPACE)
        return x.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(b, 3, t * TIME, h * SPACE, w * SPACE)


class Processor:
    """Between pixels in [0, 1] and the VAE's [-1, 1]."""

    def revert_tensor(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 0.5 + 0.5).clamp(0, 1)


class Model(nn.Module):
    """The network, with the attributes that vLLM-Omni's adapter reads."""

    def __init__(self) -> None:
        super().__init__()
        self.vae_ratio = SPACE
        self.clip_length = CLIP_FRAMES
        self.parallel_tiling = False
        # A frame at a time; `encode_videos` takes the mean over those of one latent frame.
        self.encoder = nn.Conv3d(3, CHANNELS, (1, SPACE, SPACE), stride=(1, SPACE, SPACE))
        self.quant_conv = nn.Conv3d(CHANNELS, CHANNELS, 1)
        self.post_quant_conv = nn.Conv3d(CHANNELS, CHANNELS, 1)
        self.decoder = Decoder()
        self.processor = Processor()

    def split_tiles(self, size: int, is_decoder: bool) -> tuple[list[tuple[int, int]], int, int]:
        """One tile, whatever the size in pixels."""
        return [(0, size)], size, 0

    def encode_images(self, images: Any, use_fp16_latent: bool = False) -> list[torch.Tensor]:
        """Encode one PIL image or several, each to a latent [CHANNELS, 1, height / 16, width / 16]."""
        images = images if isinstance(images, (list, tuple)) else [images]
        weight = self.encoder.weight
        latents = []
        for image in images:
            pixels = torch.from_numpy(np.array(image.convert("RGB"))).to(device=weight.device, dtype=weight.dtype)
            frame = (pixels / 127.5 - 1).permute(2, 0, 1)[None, :, None]
            latent = self.quant_conv(self.encoder(frame))[0]
            latents.append(latent.half() if use_fp16_latent else latent)
        return latents

    def encode_videos(self, videos: Any, use_fp16_latent: bool = False) -> list[torch.Tensor]:
        """Encode one video or several, each to a latent [CHANNELS, t, height / 16, width / 16].

        A video is an array of bytes [frames, height, width, 3], or a tensor [3, frames, height, width] in -1 to 1.
        """
        weight = self.encoder.weight
        latents = []
        for video in videos if isinstance(videos, (list, tuple)) else [videos]:
            if isinstance(video, np.ndarray):
                video = torch.from_numpy(video).permute(3, 0, 1, 2) / 127.5 - 1
            pixels = video.to(device=weight.device, dtype=weight.dtype)
            # As in decoding, the first frame of a clip stands alone.
            clips = [
                part.mean(dim=1, keepdim=True)
                for clip in pixels.split(CLIP_FRAMES, dim=1)
                for part in (clip[:, :1], *(clip[:, 1:].split(TIME, dim=1) if clip.shape[1] > 1 else ()))
            ]
            latent = self.quant_conv(self.encoder(torch.cat(clips, dim=1)[None]))[0]
            latents.append(latent.half() if use_fp16_latent else latent)
        return latents

    def decode_base(self, z: torch.Tensor) -> torch.Tensor:
        """Decode clip by clip: several decoder calls of one shape, then a shorter one.

        The first latent frame of a clip stands for one frame, and each of the others for `TIME`.
        """
        clips = [self.decoder(self.post_quant_conv(clip)) for clip in z.split(CLIP_LATENT_FRAMES, dim=2)]
        return torch.cat([clip[:, :, TIME - 1 :] for clip in clips], dim=2)


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
