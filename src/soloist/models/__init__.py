"""Models: policy, value model, their weights, their optimizers, and the tiny ones that are built from scratch.

Importing this room tells the Hugging Face libraries to stay offline: a model is a folder here, never a name on a hub.
"""

import os

# huggingface_hub reads this once, at its first import, so it has to be set before a file of this room imports it
os.environ.setdefault("HF_HUB_OFFLINE", "1")
