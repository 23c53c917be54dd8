"""Importing this keeps torch's misplaced warnings out of every command's output."""

import logging

_MISPLACED = (
    # Said wherever a CUDA toolkit is installed without a GPU, also to those who run on the CPU on purpose.
    "No CUDA runtime is found",
    # Said where no C++ compiler is found to ask for its features; loading needs none, and manifests pin the version.
    "Loading outdated pt2 file",
)


def _about_this_model(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_MISPLACED)


for _name in ("torch.utils.cpp_extension", "torch._inductor.package.package"):
    logging.getLogger(_name).addFilter(_about_this_model)
