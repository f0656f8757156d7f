# SPDX-License-Identifier: Apache-2.0
"""Settings of the tests: reproducible properties, one thread for torch's small products."""

import torch
from hypothesis import settings

settings.register_profile(
    "winnow", deadline=None, derandomize=True, database=None, max_examples=150, print_blob=False
)
settings.load_profile("winnow")
torch.set_num_threads(1)
