"""Keeps the libraries' own progress bars and notices off standard error; their errors still reach the caller."""

import logging
import warnings


def quiet_libraries() -> None:
    """Call before a model is opened; imports transformers."""
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    disable_progress_bars()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    for name in ("bitsandbytes", "torch", "huggingface_hub", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
