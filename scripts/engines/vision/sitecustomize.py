"""Lets the torchvision of PyPI, which is built for CUDA, be imported with a CPU build of torch.

Without its compiled part, torchvision fails at its import, because it describes two operators of that part to torch. They are
declared here, without an implementation; the processors of vision models do not use them.
"""

import sys


class _DeclareOperators:
    """Declares the operators directly before torchvision is imported; finds no module itself."""

    def __init__(self):
        self.library = None

    def find_spec(self, fullname, _path=None, _target=None):
        if fullname == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                self.library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _DeclareOperators())
