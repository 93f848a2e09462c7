"""What all tests share: one thread per process, no network for model hubs, and reproducible property tests."""

from __future__ import annotations

import os

# Before torch is imported anywhere: tests share few cores, and one thread keeps sums in one order.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from hypothesis import HealthCheck, settings

settings.register_profile(
    "soloist",
    deadline=None,
    max_examples=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("soloist")
