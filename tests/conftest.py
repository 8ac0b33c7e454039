"""Settings for all tests: the project's root on the path, few threads, for busy machines."""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch  # noqa: E402  (after the environment is set)

torch.set_num_threads(1)
