"""Keys that environment variables set, so that one batch line can vary a run: `SAVE_FREQ=5 sbatch ...`. Imports no torch.

A variable stands between the files and the command line. The names are those of the peers' launch scripts where they have
one, so that an old line goes on working.
"""

from __future__ import annotations

VARIABLES = {  # of two that set one key the later one counts
    "MODEL_PATH": "model.path",
    "DIST_CKPT_PATH": "model.path",
    "ROLLOUT_ENGINE": "rollout.engine",
    "ROLLOUT_MOE_BACKEND": "rollout.moe_backend",
    "ROLLOUT_LINEAR_BACKEND": "rollout.linear_backend",
    "ROUTER_REPLAY_MODE": "rollout.router_replay",
    "KV_CACHE_DTYPE": "rollout.kv_cache_dtype",
    "RESPONSE_LENGTH": "rollout.max_response",
    "PROMPT_LENGTH": "data.max_prompt",
    "TRAIN_FILE": "data.train",
    "VAL_FILE": "data.validation",
    "TRAIN_BATCH_SIZE": "data.prompts_per_step",
    "SAVE_CONTENTS": "checkpoint.contents",
    "LOAD_CONTENTS": "checkpoint.load_contents",
    "SAVE_FREQ": "checkpoint.every",
    "TEST_FREQ": "trainer.validate_every",
    "TOTAL_STEPS": "trainer.steps",
    "PRECISION_AWARE_OPTIMIZER": "optimizer.precision_aware",
    "OPTIMIZER_OFFLOAD_FRACTION": "optimizer.offload_fraction",
    "GRAD_DTYPE": "optimizer.grad_dtype",
    "OBJECT_STORE_GIB": "cluster.object_store_gib",
    "NNODES": "cluster.nodes",
}
