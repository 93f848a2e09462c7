"""The embedded engine: a child process that serves any Hugging Face causal LM with continuous batching.

`engine` is the parent's side (no torch), `worker` the child's; `messages` is all they share. Everything between the two
ends (`batch`, `scheduler`, `loads`, `model_runner` and what it uses) runs in the child and can be used without one.
"""
