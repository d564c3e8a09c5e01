"""Marks of tests that need something of the machine, with the reason where it is missing."""

from __future__ import annotations

import pytest
import torch

needs_inductor = pytest.mark.skipif(
    " " in torch.__file__, reason="inductor's call of the C++ compiler breaks at a space in torch's path"
)
