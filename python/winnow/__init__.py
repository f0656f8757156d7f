# SPDX-License-Identifier: Apache-2.0
"""winnow: the operators of DeepSeek-style sparse attention, forward and backward.

``winnow.reference`` has their formulas in plain torch.
"""

__version__ = "0.1.0"
