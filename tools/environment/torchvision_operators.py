"""Import hook: defines torchvision's operators just before torchvision itself runs.

mend.py copies this file into site-packages, with a `.pth` file that calls `install` at interpreter start. It has to be
that early, since transformers imports torchvision before any vLLM plugin is loaded; and it imports nothing by itself,
since every interpreter of the environment pays for it and few of them import torchvision.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

SCHEMAS = (
    "torchvision::nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "torchvision::qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def define_operators() -> None:
    """Define what torchvision's compiled library would have defined."""
    import torch

    for schema in SCHEMAS:
        name, signature = schema.split("(", 1)
        torch.library.define(name, f"({signature}")


class TorchvisionFinder:
    """A meta path finder that answers for `torchvision` alone; asking for its spec imports nothing."""

    @staticmethod
    def find_spec(fullname: str, _path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return torchvision's ordinary spec, which defines the operators first; None for every other module."""
        if fullname != "torchvision":
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(fullname, None, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                define_operators()
                run(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Put the finder first; a second call does nothing."""
    if TorchvisionFinder not in sys.meta_path:
        sys.meta_path.insert(0, TorchvisionFinder)
