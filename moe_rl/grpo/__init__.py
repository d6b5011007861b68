"""GRPO as pure functions: advantages, clipped loss, KL, aggregation, batching and mismatch of log-probs.

Nothing here knows of models, processes or configuration; tensors in, tensors out. `batching` is plain Python.
"""
