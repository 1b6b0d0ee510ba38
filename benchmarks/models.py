"""The models of the inference benchmark, in torch, and their export as ONNX files.

    python benchmarks/models.py FOLDER [NAME …]

MODELS are those of the papers; NEWER need `pip install transformers diffusers`. Each has random
weights from one seed; batch norm has statistics of its own.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import newer_models
import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

OPSET = 17


@dataclass(frozen=True)
class Benchmarked:
    """A model by its builder, and its inputs: (name, shape, integers below this or 0: floats)."""

    build: Callable[[], Any]
    inputs: tuple[tuple[str, tuple[int, ...], int], ...]
    dynamo: bool = False  # torch's newer exporter


def _cnn(function: str, *arguments: Any, size: int = 224, **options: Any) -> Benchmarked:
    def build() -> Any:
        from torch_twins import cnn

        return getattr(cnn, function)(*arguments, **options)

    return Benchmarked(build, (("image", (1, 3, size, size), 0),))


def _inception() -> Any:
    from torch_twins.inception import Inception

    return Inception(1, 1000)


def _nasnet() -> Any:
    from torch_twins.nasnet import NasNet

    return NasNet(4, 1056, 32, 1000)


def _bert() -> Any:
    from torch_twins.sequence import Bert

    return Bert()


def _nasrnn() -> Any:
    from torch_twins.recurrent import NasRnn

    return NasRnn()


def _nmt() -> Any:
    from torch_twins.recurrent import NmtStep

    return NmtStep()


def _branched() -> Any:
    """Return ResNeXt-50 as its paper draws it: 32 branches of 4 channels, then joined."""
    import torch
    from torch_twins import cnn

    class Branches(torch.nn.Module):
        def __init__(self, whole: torch.nn.Conv2d) -> None:
            super().__init__()
            self.width = whole.in_channels // whole.groups
            self.parts = torch.nn.ModuleList()
            for weights in whole.weight.detach().chunk(whole.groups):
                part = torch.nn.Conv2d(
                    self.width,
                    len(weights),
                    whole.kernel_size,
                    whole.stride,
                    whole.padding,
                    bias=False,
                )
                part.weight.data.copy_(weights)
                self.parts.append(part)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pieces = x.split(self.width, dim=1)
            return torch.cat([part(piece) for part, piece in zip(self.parts, pieces)], dim=1)

    net = cnn.resnet((3, 4, 6, 3), 64, 1000, groups=32, group_width=4)
    for module in list(net.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Conv2d) and child.groups == 32:
                setattr(module, name, Branches(child))
    return net


def _rnntc() -> Any:
    """Return the text classifier of simple recurrent units: 20 words of 1024, as TASO has it."""
    from torch_twins.recurrent import Rnntc

    return Rnntc(cell="sru")


MODELS = {
    "resnet50": _cnn("resnet", (3, 4, 6, 3), 64, 1000),
    "resnext50": _cnn("resnet", (3, 4, 6, 3), 64, 1000, groups=32, group_width=4),
    "resnext50_branches": Benchmarked(_branched, (("image", (1, 3, 224, 224), 0),)),
    "squeezenet": _cnn("squeezenet", "1.0", 1, 1000),
    "inception_v3": Benchmarked(_inception, (("image", (1, 3, 299, 299), 0),)),
    "nasnet_a": Benchmarked(_nasnet, (("image", (1, 3, 224, 224), 0),)),
    "densenet121": _cnn("densenet", (6, 12, 24, 16), 32, 1000),
    "bert_12": Benchmarked(
        _bert,
        tuple((name, (1, 128), top) for name, top in (("ids", 30_522), ("types", 2), ("mask", 2))),
    ),
    "nasrnn": Benchmarked(_nasrnn, (("x", (1, 5, 512), 0),)),
    "rnntc": Benchmarked(_rnntc, (("ids", (1, 20), 18_765),)),
    "nmt_step": Benchmarked(
        _nmt,
        (
            ("ids", (1,), 32_000),
            ("memory", (1, 40, 1024), 0),
            *((name, (1, 1024), 0) for name in ("h0", "c0", "h1", "c1")),
        ),
    ),
}

_IMAGE = ("image", (1, 3, 224, 224), 0)
NEWER = {
    name: Benchmarked(getattr(newer_models, name), inputs, dynamo=True)
    for name, inputs in {
        "vit": (_IMAGE,),
        "convnext": (_IMAGE,),
        "efficientnet": (_IMAGE,),
        "swin": (_IMAGE,),
        "gpt2": (("ids", (1, 128), 50_257),),
        "llama": (("ids", (1, 128), 32_000),),
        "t5": (("ids", (1, 64), 32_000), ("before", (1, 32), 32_000)),
        "whisper": (("spectrum", (1, 80, 3000), 0),),
        "unet": (
            ("sample", (1, 4, 32, 32), 0),
            ("step", (1,), 1000),
            ("context", (1, 77, 256), 0),
        ),
        "wav2vec2": (("sound", (1, 16_000), 0),),
    }.items()
}
_ALL = {**MODELS, **NEWER}
OF_TOKENS = ("bert_12", "gpt2", "llama")  # whose inputs are (batch, length)


def arrays(name: str) -> dict[str, np.ndarray]:
    """Return the seeded inputs of a model."""
    random = np.random.default_rng(1)
    return {
        field: random.integers(0, below, shape)
        if below
        else random.standard_normal(shape).astype(np.float32)
        for field, shape, below in _ALL[name].inputs
    }


def network(name: str) -> Any:
    """Return the torch module in evaluation mode."""
    import torch

    torch.manual_seed(0)
    module = _ALL[name].build().eval()
    generator = torch.Generator().manual_seed(1)
    for part in module.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.running_mean.copy_(0.1 * torch.randn(part.num_features, generator=generator))
            part.running_var.copy_(0.5 + torch.rand(part.num_features, generator=generator))
    return module


def export(name: str, folder: Path, symbolic: bool = False) -> Path:
    """Return the ONNX file of a model, made with torch's exporter unless it is there.

    symbolic: with a batch of any size, and of tokens a length, in place of the numbers of `inputs`.
    """
    path = folder / f"{name}{'.symbolic' * symbolic}.onnx"
    if path.exists():
        return path
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    given, dynamo, options = arrays(name), _ALL[name].dynamo, dict[str, Any]()
    dims = {0: "batch", 1: "length"} if name in OF_TOKENS else {0: "batch"}
    if dynamo:
        options = {"external_data": False, "verbose": False}
    if symbolic and dynamo:  # one row would be taken for a number
        given = {field: np.concatenate([array] * 2) for field, array in given.items()}
        dynamic = dict.fromkeys(dims, torch.export.Dim.DYNAMIC)
        options["dynamic_shapes"] = ((dynamic,) * len(given),)
    elif symbolic:
        options["dynamic_axes"] = dict.fromkeys(given, dims)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network(name),
            tuple(torch.from_numpy(array) for array in given.values()),
            str(path),
            dynamo=dynamo,
            opset_version=OPSET + dynamo,
            input_names=list(given),
            **options,
        )
    return path


if __name__ == "__main__":
    for chosen in sys.argv[2:] or MODELS:
        print(export(chosen, Path(sys.argv[1])))
