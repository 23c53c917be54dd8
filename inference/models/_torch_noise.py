"""Importing this keeps torch's one misplaced warning out of every command's output."""

import logging


def _about_this_model(record: logging.LogRecord) -> bool:
    # torch says it wherever a CUDA toolkit is installed without a GPU, also to those who run on the CPU on purpose.
    return "No CUDA runtime is found" not in record.getMessage()


logging.getLogger("torch.utils.cpp_extension").addFilter(_about_this_model)
