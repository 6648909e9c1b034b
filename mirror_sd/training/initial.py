"""Where a head starts: from the target's own last layer, norm and head, so that it has less to
learn."""

from __future__ import annotations

import torch

from mirror_sd.training.dataset import Dataset
from mirror_sd.training.draft_model import DraftModel
from mirror_sd.training.features import TargetHead
from mirror_sd.uir.draft_file import DraftSpec
from mirror_sd.uir.model_spec import ModelSpec

_ROWS = 8192
# A feature that is so many times larger than most would leave its group of 32 no codes in int8.
_OUTLIER = 16.0
_DEVIATION = 0.02


def draft_spec(
    target: ModelSpec, name: str, tokenizer: str, taps: tuple[int, ...], draft_vocab: int
) -> DraftSpec:
    """A head with one layer of the target's dimensions, in fp32."""
    return DraftSpec(
        target=name,
        tokenizer=tokenizer,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rope_theta=target.rope_theta,
        rms_eps=target.rms_eps,
        taps=taps,
        draft_vocab_size=draft_vocab,
        precision="fp32",
    )


def draft_model(spec: DraftSpec, head: TargetHead, data: Dataset, seed: int) -> DraftModel:
    """The head before training."""
    generator = torch.Generator().manual_seed(seed)
    sample = data.sample_features(_ROWS, seed).float()
    size = sample.square().mean(dim=0).sqrt()
    scale = torch.where(size > _OUTLIER * size.median(), 0.0, 1.0 / size.clamp(min=1e-6))
    model = DraftModel(spec, head.embedding.bfloat16(), scale)
    hidden = spec.hidden_size
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, shape in spec.shapes().items():
            if len(shape) == 1:
                own[name].fill_(1.0)
            else:
                own[name].normal_(0.0, _DEVIATION, generator=generator)
        # What the target's own head reads of the last layer, up to its size.
        read = head.norm * size[-hidden:]
        own["fuse_features"].zero_()
        own["fuse_features"][:, -hidden:] = torch.diag(read / read.abs().mean())
        own["fuse_input"][:, hidden:] += 0.5 * torch.eye(hidden)
        own["o"].mul_(0.25)
        own["down"].mul_(0.25)
        own["head"].copy_(head.matrix[torch.from_numpy(data.vocabulary.astype("int64"))])
        normed = head.normed(sample[:, -hidden:])
        own["final_norm"].fill_(0.5 * float(normed.square().mean().sqrt()))
    return model
